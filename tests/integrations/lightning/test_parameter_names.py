"""Names of parameters in optimizer states: right, or a number."""

from __future__ import annotations

from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

SHAPES = st.lists(st.sampled_from([(2, 3), (3,), (3, 3)]), max_size=6)


@given(SHAPES, st.lists(st.sampled_from([(2, 3), (3,), (3, 3), None]), max_size=4))
def test_a_name_is_given_where_all_ways_to_find_the_shapes_agree(candidates, shapes):
    from dsq_ckpt.integrations.lightning.parameter_names import find_unique_names  # imports Lightning

    named = [(str(place), shape) for place, shape in enumerate(candidates)]
    ways = [
        way for way in combinations(named, len(shapes))
        if all(shape in (None, own_shape) for shape, (_, own_shape) in zip(shapes, way, strict=True))
    ]
    expected = [
        names.pop() if len(names := {way[place][0] for way in ways}) == 1 else None for place in range(len(shapes))
    ]
    assert find_unique_names(shapes, named) == expected


class Net(nn.Module):
    """A buffer, a frozen layer and a tied weight are in the state dict, and no optimizer has them twice, or at all."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(7, 7))
        self.embed, self.mid = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 9, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def stepped(self, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        """Name of the parameter by the name found, for those that have no number."""
        from dsq_ckpt.integrations.lightning.parameter_names import infer_parameter_names  # imports Lightning

        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {id(parameter): name for name, parameter in self.named_parameters()}
        names = infer_parameter_names(optimizer.state_dict(), self.state_dict())
        assert len(set(names.values())) == len(given)
        return {own[id(given[number])]: name for number, name in names.items() if not name.startswith("#")}


def test_optimizers_of_usual_kinds() -> None:
    net = Net()
    trained = [parameter for name, parameter in net.named_parameters() if "frozen" not in name]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim == 1]
    for optimizer in (
        torch.optim.Adam(trained), torch.optim.SGD(trained, lr=0.1, momentum=0.9),
        torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]),
    ):
        names = net.stepped(optimizer)
        assert {"embed.weight", "mid.weight"} <= names.keys()
        assert all(name == own for own, name in names.items())
    assert net.stepped(torch.optim.SGD(trained, lr=0.1)) == {}  # without state nothing is known


def test_names_of_the_optimizer_come_first() -> None:
    """Layers of one shape in another order than the model's; without names only a number is right."""
    from dsq_ckpt.integrations.lightning.parameter_names import infer_parameter_names  # imports Lightning

    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    backwards = list(net.named_parameters())[::-1]
    optimizer = torch.optim.Adam(backwards)
    optimizer.step()
    assert infer_parameter_names(optimizer.state_dict(), net.state_dict()) == {0: "1.weight", 1: "0.weight"}
    optimizer = torch.optim.Adam([{"params": [parameter]} for _, parameter in backwards])
    optimizer.step()
    assert infer_parameter_names(optimizer.state_dict(), net.state_dict()) == {0: "#0", 1: "#1"}
