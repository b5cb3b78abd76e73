"""Which tensors are lossy: the recognised ones, and nothing that was not asked for."""

import pytest
import torch
from torch import nn

from dsq_ckpt import DSQConfig
from dsq_ckpt.engine.local_state import LocalShard, make_layout
from dsq_ckpt.engine.options import SaveOptions
from dsq_ckpt.quantization.chunk import ChunkKey
from dsq_ckpt.quantization.groups import Assignments, assign, kind_of, layer_types
from dsq_ckpt.quantization.layout import Layout

CONFIG = DSQConfig().quantize
F32 = torch.float32


@pytest.mark.parametrize("fqn, shape, group", [
    ("model.layers.0.attn.wq.weight", (256, 256), "weights/linear"),
    ("model.tok_embeddings.weight", (1000, 64), "weights/embedding"),
    ("model.wte.weight", (1000, 64), "weights/embedding"),
    ("model.conv1.weight", (64, 3, 7, 7), "weights/conv"),
    ("model.layers.0.norm.weight", (8192,), "exact"),
    ("model.ln_f.weight", (100, 100), "exact"),
    ("model.bn1.running_mean", (5000,), "exact"),
    ("model.fc.bias", (100, 100), "exact"),
    ("model.small.weight", (63, 65), "exact"),
    ("model.just_enough.weight", (64, 64), "weights/linear"),
    ("model.column.weight", (8192, 1), "exact"),
    ("model._fsdp_wrapped_module._flat_param", (100_000,), "weights/other"),
    ("optimizer.state.layers.0.wq.weight.exp_avg", (256, 256), "exp_avg/linear/relative"),
    ("optimizer.state.layers.0.wq.weight.exp_avg_sq", (256, 256), "exp_avg_sq/linear/octaves"),
    ("optim.state.wte.weight.max_exp_avg_sq", (1000, 64), "exp_avg_sq/embedding/octaves"),
    ("optimizer.state.conv.weight.momentum_buffer", (64, 64, 3, 3), "momentum/conv/relative"),
    ("optimizer.state.wq.weight.step", (), "exact"),
    ("optimizer.state.wq.weight.preconditioner", (256, 256), "exact"),  # unknown state has no known bound
    ("model.queue.momentum_buffer", (256, 256), "weights/linear"),
    ("module.exp_avg_sq", (256, 256), "weights/linear"),
    ("model.opt_state.wq.exp_avg", (256, 256), "exp_avg/linear/relative"),
    ("model.wq.weight.exp_avg", (256, 256), "exp_avg/linear/relative"),  # moments beside their parameters
    ("wq.exp_avg", (256, 256), "exp_avg/linear/relative"),
    ("optimizer.state.norm.weight.exp_avg", (8192,), "exp_avg/small"),
    ("optimizer.state.fc.bias.exp_avg_sq", (100,), "exp_avg_sq/small"),
    ("optimizer.state.small.weight.momentum_buffer", (63, 65), "momentum/small"),
])
def test_names_and_shapes(fqn, shape, group):
    assert assign(fqn, shape, F32, CONFIG).group == group


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_exact(dtype):
    assert assign("model.w.weight", (256, 256), dtype, CONFIG).config is None


def test_the_module_tree_decides_where_it_is_given():
    model = nn.ModuleDict({
        "bytes": nn.Embedding(300, 32), "positions": nn.Linear(64, 64), "mix": nn.Conv1d(64, 64, 3),
        "scale": nn.LayerNorm((64, 64)),
    })
    types = layer_types(model)
    kinds = {
        name: assign(f"app.model.{name}.weight", model[name].weight.shape, F32, CONFIG, types).group for name in model
    }
    assert kinds == {
        "bytes": "weights/embedding", "positions": "weights/linear", "mix": "weights/conv", "scale": "exact",
    }


def test_rules_come_first():
    config = DSQConfig.create({"quantize": {
        "rules": [{"pattern": "*.router.*", "exact": True}, {"pattern": "*.norm.weight", "group": "norms"},
                  {"pattern": "*", "group": "late"}],
        "groups": {"norms": {"method": "bf16"}},
    }}).quantize
    assert assign("m.router.weight", (256, 256), F32, config).config is None
    norms = assign("m.norm.weight", (8192,), F32, config)
    assert norms.group == "weights/norms" and norms.config.method == "bf16"
    assert assign("m.fc.weight", (256, 256), F32, config).group == "weights/late"
    assert assign("m.fc.weight", (6, 6), F32, config).config is None, "small tensors stay exact"


def test_cached_assignments_hold_for_their_settings_alone():
    for config in (DSQConfig(), DSQConfig.create({"quantize": {"rules": [{"pattern": "*up*", "exact": True}]}})):
        for types in (None, {"up.weight": "embedding"}):
            for name in ("model.up.weight", "optimizer.state.up.weight.exp_avg", "model.norm.weight"):
                for shape, measured in (((64, 128), True), ((64, 128), False), ((4, 8), False)):
                    known = Assignments.cached(config.quantize, types).get(name, shape, torch.float32, measured)
                    assert known == assign(name, shape, torch.float32, config.quantize, types, measured)
                    again = Assignments.cached(config.quantize.model_copy(deep=True), types and dict(types))
                    assert again.get(name, shape, torch.float32, measured) is known


def test_a_tensor_of_the_model_under_the_name_of_a_moment_is_no_moment():
    """Whatever key the model lies below; moments of such a parameter, and of others beside it, stay moments."""
    model = nn.ParameterDict({"momentum_buffer": nn.Parameter(torch.zeros(80, 80)), "w": torch.zeros(80, 80)})
    model.state = nn.ParameterDict({"exp_avg": torch.zeros(80, 80)})
    model.register_buffer("exp_avg_sq", torch.zeros(80, 80))
    kinds = {
        "momentum_buffer": "weights", "net.exp_avg_sq": "weights", "net.module.momentum_buffer": "weights",
        "net.state.exp_avg": "weights", "net.exp_avg": "exp_avg", "net.w.exp_avg_sq": "exp_avg_sq",
        "o.state.momentum_buffer.momentum_buffer": "momentum", "o.state.w.exp_avg_sq": "exp_avg_sq",
        "o.state.0.exp_avg_sq": "exp_avg_sq", "o.state.0.momentum_buffer": "momentum",
    }
    types = layer_types(model)
    assert {name: assign(name, (80, 80), F32, CONFIG, types).kind for name in kinds} == kinds
    assert {name: kind_of(name, types) for name in kinds} == kinds


@pytest.mark.parametrize(
    "name", ["state", "opt", "optimizer", "adam", "optimizer_states", "exp_avg", "Momentum_Buffer"]
)
def test_modules_may_have_names_that_optimizers_state_has(name):
    """Under any key but those; an optimizer's state below its own key stays that."""
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(80, 80), nn.LayerNorm(80))})
    model.inner = nn.ModuleDict({name: nn.ParameterList([torch.zeros(80, 80)])})
    kinds = {
        f"{name}.0.weight": "weights", f"net.module.{name}.0.weight": "weights", f"model.inner.{name}.0": "weights",
        f"{name}.1.weight": "exact", f"{name}.0.bias": "exact", f"{name}.0.hessian": "exact",
        f"optimizer.{name}.0.weight": "exact", f"optimizer.state.{name}.0.weight": "exact",
        f"exp_avg.{name}.0.weight": "exact", f"optimizer.state.{name}.0.weight.basis": "exact",
        f"optimizer.state.{name}.0.weight.exp_avg": "exp_avg", f"state.{name}.0.weight.exp_avg_sq": "exp_avg_sq",
        f"{name}.0.weight.momentum_buffer": "momentum", "optimizer.state.0.exp_avg": "exp_avg",
    }
    types = layer_types(model)
    shapes = {name: (80,) if ".1." in name or "bias" in name else (80, 80) for name in kinds}
    assert {name: assign(name, shapes[name], F32, CONFIG, types).kind for name in kinds} == kinds


def test_ranks_agree_on_first_moments_whose_update_is_not_known():
    """Whichever rank has the state that tells."""
    def layout(*names, **config):
        shards = [LocalShard(ChunkKey(name, (0, 0), (80, 80)), (80, 80), torch.float32, torch.empty) for name in names]
        return make_layout(shards, SaveOptions(DSQConfig.create({"quantize": config})))

    first, second = "optimizer.state.w.exp_avg", "optimizer.state.w.exp_avg_sq"
    for names in ([[first, second], ["optimizer.state.w.hessian"]], [[first, second, "optimizer.state.w.Q.0"], []]):
        agreed = Layout.union([layout(*own) for own in names])
        assert agreed.rounded_moments.keys() == {first} and set(agreed.tensors) == {second} and len(agreed.groups) == 1
    others = [first, second, "optimizer.state.v.hessian", "optimizer.state.w.exp_avg_slow", "hessian"]
    assert Layout.union([layout(*others)]).rounded_moments == {}
    by_rule = {"rules": [{"pattern": "*.exp_avg", "group": "linear"}]}
    by_size = {"exp_avg": {"codebook": {"fit": "kmeans"}}}
    for asked in (by_rule, by_size):
        agreed = Layout.union([layout(first, second, "optimizer.state.w.hessian", **asked)])
        assert agreed.rounded_moments == {} and first in agreed.tensors
    agreed = Layout.union([layout(first, second, "optimizer.state.w.hessian")])
    assert agreed.rounded_moments and Layout.union([agreed]) == agreed, "as plans that DCP caches make it"
