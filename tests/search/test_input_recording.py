"""The recording of what weights are multiplied by: seen wherever torch multiplies them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsq_ckpt.quantization.compensation import Compensation, ErrorSpread
from dsq_ckpt.search.input_recording import record_inputs

pytestmark = pytest.mark.usefixtures("one_thread")

FEATURES, OUTPUTS, ROWS = 12, 20, 96


class Sequences(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers = kind(FEATURES, OUTPUTS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.reshape(8, -1, FEATURES))[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(FEATURES, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*[x.reshape(8, -1, FEATURES)] * 3)[0]


class Product(nn.Module):
    """A weight of a shape, and what it is multiplied by."""

    def __init__(self, shape: list[int], product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


def autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, weight)


def experts(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([F.linear(part, own) for part, own in zip(x.reshape(4, -1, FEATURES), weight, strict=True)])


SEEN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(FEATURES, OUTPUTS),
    "bfloat16": lambda: nn.Linear(FEATURES, OUTPUTS).bfloat16(),
    "input times weight": lambda: Product([FEATURES, OUTPUTS], torch.matmul),
    "weight times input": lambda: Product([OUTPUTS, FEATURES], lambda x, weight: weight @ x.T),
    "batch of matrices": lambda: Product([4, FEATURES, OUTPUTS], lambda x, w: x.reshape(4, -1, FEATURES) @ w),
    "batch with bias": lambda: Product(
        [4, FEATURES, OUTPUTS], lambda x, w: torch.baddbmm(torch.zeros(1), x.reshape(4, -1, FEATURES), w)
    ),
    "slices": lambda: Product([4, OUTPUTS, FEATURES], experts),
    "recurrent": lambda: Sequences(nn.LSTM),
    "gated": lambda: Sequences(nn.GRU),
    "attention": Attention,
    "encoder layer": lambda: nn.TransformerEncoderLayer(FEATURES, 2, 16, batch_first=True),
    "convolution, 1 dimension": lambda: Product(
        [OUTPUTS, FEATURES, 3], lambda x, w: F.conv1d(x.reshape(-1, FEATURES, 8), w, padding=1, dilation=2)
    ),
    "autocast": lambda: Product([OUTPUTS, FEATURES], autocast),
    "cast slices": lambda: Product([4, OUTPUTS, FEATURES], lambda x, w: experts(x.double(), w.double())),
    "traced": lambda: torch.jit.trace(nn.Conv1d(FEATURES, OUTPUTS, 3), torch.zeros(2, FEATURES, 8)),
    "convolution": lambda: Product(
        [OUTPUTS, FEATURES, 2, 3], lambda x, w: F.conv2d(x.reshape(-1, FEATURES, 2, 4), w, stride=(1, 2))
    ),
}
NOT_SEEN: dict[str, Callable[[], nn.Module]] = {
    "depthwise": lambda: Product(
        [FEATURES, 1, 3], lambda x, w: F.conv1d(x.reshape(-1, FEATURES, 8), w, groups=FEATURES)
    ),
    "transposed": lambda: Product([FEATURES, 5, 3], lambda x, w: F.conv_transpose1d(x.reshape(-1, FEATURES, 8), w)),
    "no images": lambda: Product([OUTPUTS, FEATURES, 3], lambda x, w: F.conv1d(x.reshape(-1, FEATURES, 8)[:0], w)),
    "no rows": lambda: Product([OUTPUTS, FEATURES], lambda x, w: F.linear(x[:0], w)),
    "sparse": lambda: Product([FEATURES, OUTPUTS], lambda x, w: torch.mm(x.to_sparse(), w)),
    "a copy": lambda: Product([OUTPUTS, FEATURES], lambda x, w: F.linear(x, w.clone())),
    "by elements": lambda: Product([FEATURES], lambda x, w: x * w),
    "not finite": lambda: Product([OUTPUTS, FEATURES], lambda x, w: F.linear(x / 0, w)),
    "repeated in memory": lambda: Product([FEATURES], lambda x, w: F.linear(x, w.expand(5, FEATURES))),
    "bits": lambda: Product([OUTPUTS, FEATURES], lambda x, w: F.linear(x[:, ::2].double(), w.view(torch.float64))),
    "with itself": lambda: Product([FEATURES, FEATURES], lambda x, w: w.T @ w),
    "channels last": lambda: nn.Conv2d(FEATURES, OUTPUTS, 2).to(memory_format=torch.channels_last),
}


def data(rows: int = ROWS) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, generator=g) @ torch.randn(4, FEATURES, generator=g) + 0.1


def run(model: nn.Module) -> None:
    kind = next(model.parameters()).dtype
    x = data().to(kind)
    images = isinstance(model, nn.Conv2d | torch.jit.ScriptModule)
    model.eval()(x.reshape(-1, FEATURES, *[2, 4][isinstance(model, torch.jit.ScriptModule) :]) if images else x)


def find_compensations(model: nn.Module, grad: Callable[[], object] = torch.no_grad) -> dict[str, Compensation | None]:
    weights = {name: weight for name, weight in model.named_parameters() if weight.ndim > 1 or name == "weight"}
    with record_inputs(weights.values()) as recorder, grad():
        run(model)
    return {name: recorder.get_compensation(weight) for name, weight in weights.items()}


@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", SEEN)
def test_all_of_a_weight_is_seen(kind, grad):
    model = SEEN[kind]()
    for name, compensation in find_compensations(model, grad).items():
        assert compensation is not None, name
        assert compensation.elements == model.get_parameter(name).numel(), name
        places = torch.arange(compensation.elements)
        seen = torch.cat([view.view(places).reshape(-1) for view, _ in compensation.parts])
        assert torch.equal(seen.sort().values, places), "each element belongs to one matrix"


@pytest.mark.parametrize("kind", NOT_SEEN)
def test_other_products_are_left_alone(kind):
    assert set(find_compensations(NOT_SEEN[kind]()).values()) == {None}


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("linear", [data()]), ("weight times input", [data()]), ("slices", data().reshape(4, -1, FEATURES)),
        ("batch of matrices", data().reshape(4, -1, FEATURES)),
        ("convolution", [F.unfold(data().reshape(-1, FEATURES, 2, 4), (2, 3), stride=(1, 2)).mT.flatten(0, 1)]),
    ],
)
def test_moments_are_those_of_the_inputs(kind, inputs):
    (compensation,) = find_compensations(SEEN[kind]()).values()
    assert compensation is not None
    for (_, (block,)), x in zip(compensation.parts, inputs, strict=True):
        expected = ErrorSpread.from_products(x.T @ x, len(x))
        assert expected is not None and torch.equal(block.order, expected.order)
        assert block.factors == pytest.approx(expected.factors, abs=1e-3)


def test_large_matrices_are_divided(monkeypatch):
    monkeypatch.setattr("dsq_ckpt.search.input_recording._MAX_INPUTS", 5)
    (compensation,) = find_compensations(SEEN["linear"]()).values()
    assert compensation is not None
    assert [len(block.order) for block in compensation.parts[0][1]] == [4, 4, 4]
    flat = torch.randn(OUTPUTS * FEATURES)
    view = compensation.parts[0][0]
    assert torch.equal(view.view(flat), flat.view(OUTPUTS, FEATURES).T)


@pytest.mark.parametrize("seed", range(3))
def test_batches_add_up(seed):
    model, g = nn.Linear(FEATURES, OUTPUTS), torch.Generator().manual_seed(seed)
    batches = [torch.randn(30, FEATURES, generator=g) * scale for scale in (1.0, 5.0)]
    with record_inputs([model.weight]) as recorder, torch.no_grad():
        for batch in batches:
            model(batch)
    compensation, x = recorder.get_compensation(model.weight), torch.cat(batches)
    expected = ErrorSpread.from_products(x.T @ x, len(x))
    assert compensation is not None and expected is not None
    assert compensation.parts[0][1][0].factors == pytest.approx(expected.factors, abs=1e-3)


def test_long_batches_are_sampled_evenly():
    model, x = nn.Linear(FEATURES, OUTPUTS), data().repeat(100, 1)
    x[::2] *= 3
    with record_inputs([model.weight]) as recorder, torch.no_grad():
        model(x)
    compensation, expected = recorder.get_compensation(model.weight), ErrorSpread.from_products(x.T @ x, 4096)
    assert compensation is not None and expected is not None
    assert compensation.parts[0][1][0].factors == pytest.approx(expected.factors, abs=0.02)


@pytest.mark.parametrize("shape", [(1, FEATURES, 40, 3000), (3, FEATURES, 3000, 2)])
def test_large_images_are_cut(shape):
    model = nn.Conv2d(FEATURES, OUTPUTS, (2, 1), stride=(2, 1))
    with record_inputs([model.weight]) as recorder, torch.no_grad():
        model(torch.randn(shape))
        (products,) = next(iter(recorder._seen.values())).values()
    assert 0 < products.rows <= 4096


def test_sums_that_take_more_than_their_weights_are_not_made(monkeypatch):
    monkeypatch.setattr("dsq_ckpt.search.input_recording._FREE_BYTES", 0)
    models = {outputs: nn.Linear(FEATURES, outputs) for outputs in (2, 3)}  # 24 and 16 bytes per weight
    with record_inputs([model.weight for model in models.values()]) as recorder, torch.no_grad():
        for model in models.values():
            model(data())
    assert [recorder.get_compensation(models[outputs].weight) is None for outputs in models] == [True, False]


def test_parameters_in_one_buffer():
    buffer = torch.randn(2, OUTPUTS, FEATURES)
    with record_inputs([buffer[0], buffer[1]]) as recorder, torch.no_grad():
        F.linear(data(), buffer[1])
    assert recorder.get_compensation(buffer[0]) is None
    second = recorder.get_compensation(buffer[1])
    assert second is not None and second.parts[0][0].offset == 0


def test_views_that_overlap_count_once():
    def twice(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight) + F.linear(x, weight[:4]).sum() + F.linear(x[:, :OUTPUTS], weight.T[:, :12]).sum()

    (compensation,) = find_compensations(Product([FEATURES, FEATURES], twice)).values()
    assert compensation is not None and compensation.elements == FEATURES * FEATURES


def test_backends_that_torch_may_use_are_as_before():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with pytest.raises(KeyError), record_inputs([]):
            raise KeyError
        assert torch.backends.mkldnn.enabled and not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_compiled_code_is_seen_and_runs_again_afterwards():
    runs = []

    def backend(graph, inputs):
        return lambda *arguments: runs.append(len(arguments)) or graph(*arguments)

    model = nn.Linear(FEATURES, OUTPUTS)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        compiled(data())
        with record_inputs([model.weight]) as recorder:
            compiled(data())
        compiled(data())
    assert len(runs) == 2 and recorder.get_compensation(model.weight) is not None


def test_operators_of_higher_order_are_called():
    def chosen(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cond(x.sum() > -1e9, lambda x: F.linear(x, weight), lambda x: F.linear(-x, weight), (x,))

    model = Product([OUTPUTS, FEATURES], chosen)
    with torch.no_grad():
        expected = model(data())
        with record_inputs([model.weight]):
            assert torch.equal(model(data()), expected)
        assert torch.equal(model(data()), expected)


def test_threads_that_record_put_back_what_there_was():
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with record_inputs([]):
            inside.set()
            go_on.wait(60)

    def second() -> None:
        inside.wait(60)
        go_on.set()
        with record_inputs([]):
            pass

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.backends.mkldnn.enabled and torch.backends.mha.get_fastpath_enabled()
