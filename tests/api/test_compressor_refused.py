"""What a `Compressor` refuses: searches, optimizers and states that do not belong to its model."""


import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.errors import ConfigError, LoadFailed
from tests.helpers.training import Net, train_model


def test_a_search_that_does_not_fit_the_codebook_is_refused():
    model, optimizer = train_model(0)
    config = {"quantize": {"weights": {"codebook": {"fit": "kmeans"}}}}
    with pytest.raises(ConfigError, match=r"(?s)search of system 'dsq' does not fit .*step.*leave out `evaluate`"):
        dsq_ckpt.Compressor(model, optimizer, config, lambda: 1.0)
    dsq_ckpt.Compressor(model, optimizer, config).close()


def test_an_optimizer_of_another_model_is_refused():
    model = Net()
    with pytest.raises(ConfigError, match=r"parameter group 0 .* shape \(128, 64\).*not the model's"):
        dsq_ckpt.Compressor(model, torch.optim.AdamW(Net().parameters()))


@pytest.mark.parametrize("steps", [0, 2])
def test_parameters_that_were_replaced_are_refused(tmp_path, steps):
    """A save and a load ended with `KeyError: 0`, or advised a step, which would not help."""
    model, optimizer = train_model(steps)
    compressor = dsq_ckpt.Compressor(model, optimizer)
    compressor.save(tmp_path / "a")
    values = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    for use in (lambda: compressor.save(tmp_path / "b"), lambda: compressor.load(tmp_path / "a"), compressor.state):
        with pytest.raises(ConfigError, match=r"not the model's.*load_state_dict\(assign=True\)"):
            use()
    assert not (tmp_path / "b").exists() and not model.hidden.weight.any()
    assert bool(optimizer.state) == bool(steps)


def test_an_optimizer_that_could_not_be_restored_is_refused(tmp_path):
    """LBFGS; as the objects that they are, it and its model go on from a load as if nothing had happened."""
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (model(inputs) - inputs[:, :1]).square().mean()
            loss.backward()
            return loss
        return optimizer.step(closure).item()

    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    with pytest.raises(ConfigError, match=r"LBFGS\.step\(\) cannot be called as .*by dsq_ckpt\.save and"):
        dsq_ckpt.Compressor(*make())
    model, optimizer = make()
    for _ in range(3):
        step(model, optimizer)
    dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "a", config="exact")
    losses = [step(model, optimizer) for _ in range(3)]
    model, optimizer = make()
    dsq_ckpt.load({"model": model, "optimizer": optimizer}, tmp_path / "a")
    assert [step(model, optimizer) for _ in range(3)] == losses


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's and Lightning's: without hooks of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Bare(torch.optim.SGD):
    def step(self):
        super().step()


class Asserts(torch.optim.Adam):
    """As sharpness-aware ones."""

    def step(self, closure=None):
        assert closure is not None, "it looks at two points"
        return super().step(closure)


class TrainsInTrainMode(torch.optim.Adam):
    """As schedule-free ones, which begin in eval mode."""

    training = False

    def train(self):
        self.training = True

    def eval(self):
        self.training = False

    def step(self, closure=None):
        assert self.training, "not in train mode"
        return super().step(closure)


def test_wrapped_optimizers_are_what_they_wrap(tmp_path):
    model = Net()
    with pytest.raises(ConfigError, match=r"LBFGS\.step\(\) cannot be called as"):
        dsq_ckpt.Compressor(model, Wrapped(torch.optim.LBFGS(model.parameters())))
    wrapped = Wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    with dsq_ckpt.Compressor(model, wrapped, every=1) as compressor:  # averages gradients, by hooks
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        wrapped.step()
        assert compressor._gradients()
        compressor.save(tmp_path / "a")


class Lookahead(torch.optim.SGD):
    """One with state of its own beside that of another."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups[0]["params"], lr=0.0)
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["slow"] = parameter.detach() * 0.5


def test_an_optimizer_that_is_more_than_it_wraps_is_saved_as_it_is(tmp_path):
    model = Net()
    lookahead = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    with dsq_ckpt.Compressor(model, lookahead, every=1) as compressor:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        lookahead.step()
        assert compressor.optimizer is lookahead
        state = compressor.state()["optimizer"]["state"]
    assert state and all("slow" in text for text in state.values())


def test_a_step_that_takes_no_closure_or_needs_one_cannot_be_restored(tmp_path):
    """A load says what a signature does not tell, and leaves the optimizer as it was."""
    model = Net()
    with pytest.raises(ConfigError, match=r"Bare\.step\(\) cannot be called as step\(closure=None\)"):
        dsq_ckpt.Compressor(model, Bare(model.parameters(), lr=0.1))
    optimizer = Asserts(model.parameters(), lr=0.1)
    with dsq_ckpt.Compressor(model, optimizer) as compressor:
        compressor.save(tmp_path / "a")
        with pytest.raises(LoadFailed, match=r"Asserts\.step\(\) cannot .*AssertionError: it looks at two points"):
            compressor.load(tmp_path / "a")
    assert optimizer.param_groups[0]["lr"] == 0.1 and not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimizer_that_steps_in_train_mode_alone_is_told_so(tmp_path):
    """Schedule-free optimizers begin in eval mode; after train() all of their state is restored."""
    def new():
        torch.manual_seed(0)
        model = Net()
        return model, TrainsInTrainMode(model.parameters(), lr=0.1)

    model, optimizer = new()
    optimizer.train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with dsq_ckpt.Compressor(model, optimizer) as compressor:
        compressor.save(tmp_path / "a")
    model, restored = new()
    with dsq_ckpt.Compressor(model, restored) as compressor:
        with pytest.raises(LoadFailed, match=r"call its train\(\) before the load.*Assert.*not in train"):
            compressor.load(tmp_path / "a")
        restored.train()
        compressor.load(tmp_path / "a")
    assert len(restored.state) == len(optimizer.state) > 0


def test_state_that_is_not_the_models_is_refused(tmp_path):
    model, optimizer = train_model()
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: 1.0)
    compressor.state = lambda extra=None: {"model": {k: v.clone() for k, v in model.state_dict().items()}}
    with pytest.raises(ConfigError, match=r"'model\.embed\.weight' is not a tensor of the model that is evaluated"):
        compressor.save(tmp_path / "a")
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_extra_may_not_hide_the_model(tmp_path):
    model, optimizer = train_model(1)
    with pytest.raises(ConfigError, match="extra has the key 'model'"):
        dsq_ckpt.Compressor(model, optimizer).save(tmp_path / "a", extra={"model": {}})


def test_a_model_that_has_seen_no_batch_is_refused_by_name(tmp_path):
    """Its parameters have no shapes yet. Once it has seen one, it is saved and loaded as any model is."""
    def make():
        model = nn.Sequential(nn.LazyLinear(100), nn.Linear(100, 60))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, dsq_ckpt.Compressor(model, optimizer)

    says = r"'0\.weight' of the model is not initialized.*call the model with one"
    model, optimizer, compressor = make()
    with pytest.raises(ConfigError, match=says):
        compressor.save(tmp_path / "0")
    model(torch.randn(4, 80)).square().mean().backward()
    optimizer.step()
    compressor.save(tmp_path / "1")
    other, _, again = make()
    with pytest.raises(ConfigError, match=says):
        again.load(tmp_path / "1")
    with pytest.raises(LoadFailed, match=r"'0\.weight' of the module is not initialized.*before a load"):
        dsq_ckpt.load({"model": other}, tmp_path / "1")
    other(torch.zeros(1, 80))
    again.load(tmp_path / "1")
    assert torch.allclose(other[0].weight, model[0].weight, atol=0.01)


def test_an_optimizer_that_torch_cannot_initialize_is_loaded_after_a_step(tmp_path):
    """The error told that SparseAdam could not be restored in another process."""

    def make_trained(steps):
        model = nn.Embedding(300, 64, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters())
        for _ in range(steps):
            model(torch.arange(32)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = make_trained(2)
    dsq_ckpt.Compressor(model, optimizer, "exact").save(tmp_path / "a")
    with pytest.raises(LoadFailed, match=r"SparseAdam\.step\(\) .*: take a step with gradients before the load"):
        dsq_ckpt.Compressor(*make_trained(0)).load(tmp_path / "a")
    other, target = make_trained(1)
    dsq_ckpt.Compressor(other, target).load(tmp_path / "a")
    for key, value in optimizer.state[model.weight].items():
        assert torch.equal(torch.as_tensor(target.state[other.weight][key]), torch.as_tensor(value))
