"""The C files of the coder, with sanitizers, on 40,000 hostile blocks, tables and models for each path."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dsq_ckpt import native
from dsq_ckpt.coding import ChangesCoder, RansCoder
from tests.coding import common, test_changes

NATIVE = Path(native.__file__).parent
FLAGS = ["-g1", "-Og", "-ffp-contract=off", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
ROUNDS = 40_000


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The fuzzer, compiled."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("neither gcc nor clang is installed")
    target = tmp_path_factory.mktemp("fuzz") / "fuzz_lanes"
    trial = target.with_name("trial.c")
    trial.write_text("int main(void) { return 0; }")
    build = subprocess.run([compiler, *FLAGS, str(trial), "-o", str(target)], capture_output=True, text=True)
    if build.returncode or subprocess.run([str(target)]).returncode:
        pytest.skip(f"{compiler} has no sanitizers that work here: {build.stderr.strip()[:200]}")
    sources = [str(file) for file in sorted(NATIVE.glob("*.c"))]
    sources.append(str(Path(__file__).with_name("fuzz_lanes.c")))
    # Without paths of x86, for the compiler to look at, and the driver that is used.
    for flags in (["-O1", "-DDSQ_PLAIN_ONLY"], FLAGS):
        build_all = [compiler, *flags, "-Wall", "-Wextra", "-Werror", *sources, "-o", str(target), "-lm"]
        subprocess.run(build_all, check=True)
    return target


def cases():
    """(coder, codes, parent, contexts, symbols, counts to add): short and long blocks, escapes, all 256 symbols."""
    rng = np.random.default_rng(0)
    for n in (200, 33_000):
        yield RansCoder, *common.migrating(n, 30, 0.7, 1), 30, 30, 0
        yield RansCoder, *common.migrating(n, 40, 0.98, 2), 40, 40, 0
        yield ChangesCoder, *test_changes.mixed(n, 3), 40, 40, 0
        yield ChangesCoder, *common.migrating(n, 40, 0.95, 4), 40, 250, np.arange(250) % 7 == 0
        yield RansCoder, common.migrating(n, 39, 0.5, 5)[0], None, 0, 39, 0
        codes = np.where(rng.random(n) < 0.01, rng.integers(0, 256, n), 3).astype(np.uint8)
        few = np.where(np.arange(256) == 3, 10**7, 1)
        yield RansCoder, codes, rng.integers(0, 3, n).astype(np.uint8), 3, 256, few
        yield RansCoder, codes, None, 0, 256, few


def write_case(file, cls, codes, parent, contexts, symbols, added):
    coder = cls.fit(common.count(codes, parent, contexts, symbols) + added)
    decoder, encoder = (coder._decoder_tables, coder._encoder_tables) if parent is not None else (
        coder._keyframe_decoder_tables, coder._keyframe_encoder_tables)
    parts = [
        *decoder, encoder.table, encoder.escapes, b"" if parent is None else parent, codes,
        coder.encode(codes, parent), coder.to_bytes()[5:],
        *((coder._kinds, coder._limits) if isinstance(coder, ChangesCoder) else (b"", b"")),
    ]
    with open(file, "wb") as out:
        out.write(np.array([encoder.shift, symbols], "<u8").tobytes())
        for part in parts:
            data = part if isinstance(part, bytes) else part.tobytes()
            out.write(len(data).to_bytes(8, "little") + data)


@pytest.mark.slow
@pytest.mark.parametrize("name", native.PATHS[1:])
def test_nothing_is_read_or_written_outside(driver, tmp_path, name):
    files = []
    for number, case in enumerate(cases()):
        files.append(str(tmp_path / str(number)))
        write_case(files[-1], *case)
    if name not in native.available() and name != "c":
        pytest.skip(f"this machine has only {native.available()}")
    short, long = files[: len(files) // 2], files[len(files) // 2 :]
    for chosen, rounds in ((short, ROUNDS * 9 // 10), (long, ROUNDS // 10)):
        ran = subprocess.run(
            [str(driver), str(native.PATHS.index(name) - 1), str(rounds), "1", *chosen], capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr[-4000:]
        passed, refused = map(int, ran.stdout.split())
        assert passed + refused == rounds and passed > rounds // 20 and refused > rounds // 3
