"""A codebook, and a system, from outside the package do all that those of the package do."""

from __future__ import annotations

import inspect
import json
import pickle
import sys
import textwrap
from importlib import reload
from typing import Literal

import numpy as np
import pytest
import torch
from pydantic import Field

import dsq_ckpt
from dsq_ckpt import ConfigError, DSQConfig, codebooks
from dsq_ckpt.codebooks import CODEBOOKS, CodebookConfig, LevelFit, RefinementFit, base, register_codebook
from dsq_ckpt.config.systems import SYSTEMS, System, register_system
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers import processes
from tests.helpers.commands import dsq_json
from tests.helpers.states import relative_error
from tests.helpers.training import Net, compute_loss, train

POWERS = {"quantize": {"weights": {"codebook": {"fit": "powers", "count": 12}, "refinement_bits": 3}}}


@pytest.fixture
def outside(monkeypatch):
    """The module `outside`, registered for one test."""
    from tests.codebooks import outside

    reload(outside)
    yield outside
    CODEBOOKS.pop("powers", None)
    SYSTEMS.pop("powers", None)


def python(text, *arguments):
    status, output = processes.run(["-c", text, *arguments], forked=True)
    assert status == 0, output
    return output


def loaded(path, outside, **options):
    state = {name: torch.zeros_like(value) for name, value in outside.state_at(0).items()}
    dsq_ckpt.load(state, path, **options)
    return state


def test_a_chain_of_deltas(tmp_path, outside):
    """Values are within the levels' spacing, the refinement layer makes them finer, and deltas pay."""
    paths = [tmp_path / str(step) for step in range(3)]
    for step, path in enumerate(paths):
        dsq_ckpt.save(outside.state_at(step), path, config=POWERS)
        base, full = (loaded(path, outside, refinement=refined) for refined in (False, True))
        for name, value in outside.state_at(step).items():
            large = value.abs() > value.abs().max() / 8
            assert float(((base[name] - value).abs() / value.abs())[large].max()) < 0.25, "they are 2**0.5 apart"
            assert relative_error(value, full[name]) < 0.3 * relative_error(value, base[name])
    manifests = [Manifest.read(path) for path in paths]
    assert [manifest.depth for manifest in manifests] == [0, 1, 2]
    assert manifests[2].sum_bytes("own") < manifests[0].sum_bytes("own") / 1.5
    assert DSQConfig.create(manifests[0].config) == DSQConfig.create(POWERS)


def test_a_run_goes_on_in_another_process(tmp_path, outside):
    for step in range(2):
        dsq_ckpt.save(outside.state_at(step), tmp_path / str(step), config=POWERS)
    python(
        f"import dsq_ckpt; from tests.codebooks import outside\n"
        f"state = outside.state_at(0); dsq_ckpt.load(state, '{tmp_path}/1')\n"
        f"dsq_ckpt.save(outside.state_at(2), '{tmp_path}/2', config={POWERS})"
    )
    assert Manifest.read(tmp_path / "2").depth == 2 and Manifest.read(tmp_path / "2").groups["weights/linear"].delta


def test_a_process_that_does_not_know_the_codebook(tmp_path, outside):
    """It loads, inspects and verifies what was saved; a configuration with the codebook says what to do."""
    for step in range(2):
        dsq_ckpt.save(outside.state_at(step), tmp_path / str(step), config=POWERS)
    torch.save(loaded(tmp_path / "1", outside), tmp_path / "expected.pt")
    output = python(f"""
import torch, dsq_ckpt
from dsq_ckpt.codebooks import CODEBOOKS
from tests.helpers.commands import dsq_json, dsq_stdout
assert "powers" not in CODEBOOKS
expected = torch.load('{tmp_path}/expected.pt')
state = {{name: torch.zeros_like(value) for name, value in expected.items()}}
dsq_ckpt.load(state, '{tmp_path}/1')
assert all(torch.equal(state[name], expected[name]) for name in state)
assert " powers " in dsq_stdout("inspect", '{tmp_path}/1', columns=200)
assert dsq_json("inspect", '{tmp_path}/1')["config"]["quantize"]["weights"]["codebook"]["fit"] == "powers"
dsq_stdout("verify", '{tmp_path}/1')
dsq_ckpt.save(state, '{tmp_path}/2')
try:
    dsq_ckpt.save(state, '{tmp_path}/3', config={POWERS})
except dsq_ckpt.ConfigError as error:
    print(error)
""")
    assert "quantize.weights.codebook: fit: expected 'adaptive', " in output
    assert "(found {'fit': 'powers', 'count': 12}); if it is another package's, import the module that " in output
    assert Manifest.read(tmp_path / "2").depth == 2, "a run may go on with another codebook"
    assert not (tmp_path / "3").exists()


def test_a_codebook_says_what_it_is_not_for(outside, monkeypatch):
    """One without a level at zero may serve second moments, though its axis is linear."""
    tree = {"quantize": {"exp_avg_sq": {"codebook": {"fit": "powers"}}}}
    with pytest.raises(dsq_ckpt.ConfigError, match="fit 'powers' measures distance on a linear axis"):
        dsq_ckpt.DSQConfig.create(tree)
    monkeypatch.setattr(outside.Powers, "explain_misfit", lambda codebook, kind, in_use=True: None)
    assert dsq_ckpt.DSQConfig.create(tree).quantize.exp_avg_sq.codebook == outside.Powers()


def test_an_installed_package_needs_no_import(tmp_path, outside):
    """Entry points name its codebooks and systems; one that is broken says which."""
    about = tmp_path / "site" / "outside-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[dsq_ckpt.codebooks]\npowers = tests.codebooks.outside:Powers\nbroken = nowhere_at_all:Broken\nother = json\n"
        "[dsq_ckpt.systems]\npowers = tests.codebooks.outside:SYSTEM\n"
    )
    torch.save(outside.state_at(0), tmp_path / "in.pt")
    text = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})" + """
from dsq_ckpt import ConfigError, DSQConfig
for fit in ("broken", "other", "power", "powers"):
    try:
        print(DSQConfig.create({"quantize": {"weights": {"codebook": {"fit": fit}}}}).quantize.weights.codebook)
    except ConfigError as error:
        print(error)
from dsq_ckpt.cli import app; app()
"""
    arguments = ["compress", str(tmp_path / "in.pt"), str(tmp_path / "out"), "--system", "powers"]
    output = python(text, *arguments)
    assert dsq_json("inspect", tmp_path / "out")["config"]["quantize"]["weights"]["codebook"]["fit"] == "powers"
    assert "codebook 'broken': nowhere_at_all:Broken cannot be imported: ModuleNotFoundError" in output
    assert "codebook 'other': importing json registers nothing of that name" in output
    assert "did you mean 'powers'?" in output and "fit='powers' count=16" in output


def test_the_example_of_the_contract(tmp_path, outside):
    """As `codebooks.base` shows it; as many values are near each level."""
    names = {**vars(codebooks), "Literal": Literal, "Field": Field, "np": np}
    code = inspect.cleandoc(str(base.__doc__)).partition("by one class:\n")[2].partition("\nIts fields")[0]
    try:
        exec(compile(textwrap.dedent(code), "example", "exec", dont_inherit=True), names)
        tree = {"quantize": {"weights": {"codebook": {"fit": "quantiles", "bins": 32}, "refinement_bits": 0}}}
        dsq_ckpt.save(outside.state_at(0), tmp_path / "a", config=tree)
    finally:
        CODEBOOKS.pop("quantiles", None)
    values = torch.cat([value.flatten() for value in loaded(tmp_path / "a", outside).values()])
    counts = values.unique(return_counts=True)[1]
    assert len(counts) == 32 and float(counts[1:-1].min() / counts[1:-1].max()) > 0.5


def test_keys_of_its_own(outside):
    with pytest.raises(ConfigError, match=r"codebook\.count: expected .* 127 \(found 128\)"):
        DSQConfig.create({"quantize": {"weights": {"codebook": {"fit": "powers", "count": 128}}}})
    with pytest.raises(ConfigError, match=r"codebook\.counts: unknown key; did you mean 'count'\?"):
        DSQConfig.create({"quantize": {"weights": {"codebook": {"fit": "powers", "counts": 12}}}})
    with pytest.raises(ConfigError, match="codebooks have it with fit: powers"):
        DSQConfig.create({"quantize": {"weights": {"codebook": {"count": 12}}}})
    config = DSQConfig.create(POWERS)
    tree = json.loads(config.model_dump_json())
    assert tree["quantize"]["weights"]["codebook"] == {"fit": "powers", "count": 12, "base": 2**0.5}
    assert DSQConfig.create(tree) == config == pickle.loads(pickle.dumps(config)), "as ranks send it to each other"
    assert config.with_values(**{"quantize.weights.codebook.count": 9}).quantize.weights.codebook.count == 9


def test_a_search_by_its_system(tmp_path, outside):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, 40)
    dsq_ckpt.Compressor(model, optimizer, {"system": "powers"}, lambda: compute_loss(model)).save(tmp_path / "a")
    manifest = Manifest.read(tmp_path / "a")
    assert manifest.config["system"] == "powers" and manifest.quality["satisfied"]
    assert manifest.quality["chosen"]["base"] in outside.SYSTEM.space.axes[0].values


def test_a_system_that_nobody_registered():
    with pytest.raises(ConfigError, match=r"system: expected 'dsq', .* or 'exact' \(found 'powers'\); .* import the"):
        DSQConfig(system="powers")


@pytest.mark.parametrize(("proposal", "says"), [
    (LevelFit(np.array([2.0, 1.0])), "levels that are not finite or do not ascend"),
    (LevelFit(np.array([np.nan])), "levels that are not finite or do not ascend"),
    (LevelFit(np.arange(1.0, 256.0)), r"float64 of shape \(255,\), expected float64\[1 to 254\]"),
    (LevelFit(np.array([1, 2])), r"int64 of shape \(2,\)"),
    (LevelFit(np.array([1.0]), forced=np.ones(3, bool)), "masks that are not bool"),
    (LevelFit(np.array([1.0]), pruned=np.ones(32518)), "masks that are not bool"),
    (LevelFit(np.array([1.0]), codes=np.full(32518, 9, np.uint8)), "codes that are not uint8"),
    (LevelFit(np.array([1.0]), centred=True), "centred levels without a step, or not on the logarithmic axis"),
])
def test_a_proposal_that_is_no_codebook(tmp_path, monkeypatch, outside, proposal, says):
    """It would be stored wrongly; nothing is written."""
    monkeypatch.setattr(outside.Powers, "propose", lambda self, histogram: proposal)
    with pytest.raises(dsq_ckpt.DSQError, match=f"codebook 'powers' .* proposes .*{says}"):
        dsq_ckpt.save(outside.state_at(0), tmp_path / "a", config=POWERS)
    assert not (tmp_path / "a").exists()


def test_more_refinement_than_is_configured(tmp_path, monkeypatch, outside):
    monkeypatch.setattr(outside.Powers, "refinement", lambda self, most, squared_error: RefinementFit(most + 1))
    with pytest.raises(dsq_ckpt.DSQError, match="codebook 'powers' asks for 4 refinement bits, of 3 at most"):
        dsq_ckpt.save(outside.state_at(0), tmp_path / "a", config=POWERS)
    for factor in (0.5, float("nan")):
        monkeypatch.setattr(outside.Powers, "refinement", lambda *_, factor=factor: RefinementFit(2, factor))
        with pytest.raises(dsq_ckpt.DSQError, match=f"codebook 'powers' widens cells {factor} times"):
            dsq_ckpt.save(outside.state_at(0), tmp_path / "a", config=POWERS)


def test_invalid_registrations_are_refused(outside):
    class Nameless(CodebookConfig):
        def propose(self, histogram):
            raise NotImplementedError

    class Abstract(CodebookConfig):
        fit: Literal["abstract"] = "abstract"

    class Lattice(CodebookConfig):
        fit: Literal["lattice"] = "lattice"

        def propose(self, histogram):
            raise NotImplementedError

    wrong = ((Nameless, "Literal"), (Abstract, "does not define propose"), (Lattice, "'lattice' is registered"))
    for cls, says in wrong:
        with pytest.raises(ConfigError, match=says):
            register_codebook(cls)
    with pytest.raises(ConfigError, match="system 'lc' is registered already"):
        register_system(System("lc", "", "", {}, None))
    assert register_system(SYSTEMS["lc"]) is SYSTEMS["lc"]
    assert "tests.codebooks.outside" in sys.modules and outside.Powers is CODEBOOKS["powers"]
