"""What a `Compressor` refuses: searches, optimizers and states that do not belong to its model."""


import pytest
import torch
from torch import nn

import dsq_ckpt
from dsq_ckpt.errors import ConfigError
from tests.helpers.training import Net, trained


def test_a_search_that_does_not_fit_the_codebook_is_refused():
    model, optimizer = trained(0)
    config = {"quantize": {"weights": {"codebook": {"fit": "kmeans"}}}}
    with pytest.raises(ConfigError, match=r"(?s)search of system 'dsq' does not fit .*step.*leave out `evaluate`"):
        dsq_ckpt.Compressor(model, optimizer, config, lambda: 1.0)
    dsq_ckpt.Compressor(model, optimizer, config).close()


def test_an_optimizer_of_another_model_is_refused():
    model = Net()
    with pytest.raises(ConfigError, match=r"parameter group 0 .* shape \(128, 64\).*not the model's"):
        dsq_ckpt.Compressor(model, torch.optim.AdamW(Net().parameters()))


def test_an_optimizer_that_could_not_be_restored_is_refused(tmp_path):
    """LBFGS; as the objects that they are, it and its model go on from a load as if nothing had happened."""
    def made():
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
    with pytest.raises(ConfigError, match=r"LBFGS\.step\(\) needs a closure: .*by dsq_ckpt\.save and dsq_ckpt\.load"):
        dsq_ckpt.Compressor(*made())
    model, optimizer = made()
    for _ in range(3):
        step(model, optimizer)
    dsq_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "a", config="exact")
    losses = [step(model, optimizer) for _ in range(3)]
    model, optimizer = made()
    dsq_ckpt.load({"model": model, "optimizer": optimizer}, tmp_path / "a")
    assert [step(model, optimizer) for _ in range(3)] == losses


def test_state_that_is_not_the_models_is_refused(tmp_path):
    model, optimizer = trained()
    compressor = dsq_ckpt.Compressor(model, optimizer, evaluate=lambda: 1.0)
    compressor.state = lambda extra=None: {"model": {k: v.clone() for k, v in model.state_dict().items()}}
    with pytest.raises(ConfigError, match=r"'model\.embed\.weight' is not a tensor of the model that is evaluated"):
        compressor.save(tmp_path / "a")
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_extra_may_not_hide_the_model(tmp_path):
    model, optimizer = trained(1)
    with pytest.raises(ConfigError, match="extra has the key 'model'"):
        dsq_ckpt.Compressor(model, optimizer).save(tmp_path / "a", extra={"model": {}})
