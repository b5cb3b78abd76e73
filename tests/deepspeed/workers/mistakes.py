"""Mistakes of users and full disks: what is told, and that nothing is left behind. argv = a directory."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from common import EXACT, LOSSY, Model, begin, check, end, engine_of, error_of, everywhere, settings, train

import dsq_ckpt.deepspeed
from dsq_ckpt.deepspeed import engine as of_engine
from dsq_ckpt.deepspeed import tags as of_tags
from dsq_ckpt.errors import CheckpointNotFound, ConfigError, DSQError, LoadFailed, SaveFailed
from dsq_ckpt.storage.manifest import Manifest
from tests.helpers.new_process import begin_new_process


def names(directory: Path) -> list[str]:
    """All that lies below a directory, but for DeepSpeed's scripts."""
    dist.barrier()
    paths = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.suffix != ".py")
    dist.barrier()
    return paths


def told(work: Any) -> list[str]:
    """The warnings that a call gives, on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [
        str(warning.message) for warning in caught if "dsq" in str(warning.message) or "tag" in str(warning.message)
    ]


def tags_by_rank(run: Path) -> None:
    """Tags that differ, as times of day do: one directory, that of rank 0, and the warning says so."""
    rank = dist.get_rank()
    for mode in ("WARN", "IGNORE"):
        for stage in (0, 2):
            engine = engine_of({**settings(stage), "checkpoint": {"tag_validation": mode}}, EXACT)
            train(engine, 0, 1)
            place = run / f"{mode}{stage}"
            said = told(partial(engine.save_checkpoint, str(place), tag=f"tag-{rank}"))
            tags = [name.split("/")[0] for name in names(place)]
            check(set(tags) == {"tag-0", "latest"}, f"{mode}, stage {stage}: one directory: {set(tags)}")
            check(rank > 0 or ["rank 0: 'tag-0', rank 1: 'tag-1'" in text for text in said] == [True], f"told: {said}")
            expected = train(engine, 1, 2)
            again = engine_of(settings(stage), EXACT, seed=1)
            again.load_checkpoint(str(place))
            check(train(again, 1, 2) == expected, f"{mode}, stage {stage}: it loads")
    error = error_of(lambda: again.load_checkpoint(str(place), tag=f"tag-{rank}"))
    check(isinstance(error, LoadFailed) and "rank 1: 'tag-1'" in str(error), f"a load of two tags: {error}")
    engine = engine_of({**settings(2), "checkpoint": {"tag_validation": "FAIL"}}, EXACT)
    error = error_of(lambda: engine.save_checkpoint(str(run / "FAIL"), tag=f"tag-{rank}"))
    check(isinstance(error, AssertionError) and names(run / "FAIL") == [], f"FAIL is DeepSpeed's: {error}")
    error = error_of(lambda: engine.save_checkpoint(str(run / f"at-{rank}"), tag="a"))
    check(isinstance(error, SaveFailed) and "save_dir differs by rank" in str(error), f"two directories: {error}")
    for tag in ("", "..", "a/../b", "/abs", "latest", " a", "a\nb"):
        error = error_of(partial(engine.save_checkpoint, str(run / "odd"), tag=tag))
        check(isinstance(error, SaveFailed) and f"the tag {tag!r}" in str(error), f"{error}")
    check(names(run / "odd") == [], "nothing was written")
    engine.save_checkpoint(str(run / "odd"), tag=5)
    engine.save_checkpoint(str(run / "odd"), tag="a/b")
    check(engine.load_checkpoint(str(run / "odd"), tag=5)[0] is not None, "numbers and paths are tags")
    check(engine.load_checkpoint(str(run / "odd"))[0].endswith("a/b/mp_rank_00_model_states.pt"), "and come back")


def missing_tags(run: Path) -> None:
    """A load of what is not there says what is."""
    engine = engine_of(settings(2), EXACT)
    train(engine, 0, 1)
    for tag in ("first", "second"):
        engine.save_checkpoint(str(run), tag=tag)
    own = None if dist.get_rank() else "second"  # the others take it from `latest`
    check(engine.load_checkpoint(str(run), tag=own)[0] is not None, "one rank names what latest says")
    error = error_of(lambda: engine.load_checkpoint(str(run), tag=own and "first"))
    check(isinstance(error, LoadFailed) and "differs by rank" in str(error), f"one rank names another: {error}")
    error = error_of(lambda: engine.load_checkpoint(str(run), tag="third"))
    check(isinstance(error, CheckpointNotFound), f"a missing tag: {error}")
    check("has the tags 'first', 'second', and 'latest' says 'second'" in str(error), "says which there are")
    error = error_of(lambda: engine.load_checkpoint(str(run / "nowhere"), tag="third"))
    check("is no directory" in str(error), f"a missing directory: {error}")
    dist.barrier()
    for text, says in (("gone", "'latest' says 'gone'"), ("", "latest' is empty")):
        if dist.get_rank() == 0:
            (run / "latest").write_text(text)
            (run / "empty").mkdir(exist_ok=True)
        dist.barrier()
        error = error_of(lambda: engine.load_checkpoint(str(run)))
        check(isinstance(error, CheckpointNotFound) and says in str(error), f"latest: {error}")
    error = error_of(lambda: engine.load_checkpoint(str(run), tag="empty"))
    check(isinstance(error, CheckpointNotFound) and "is empty" in str(error), f"an empty tag: {error}")
    dist.barrier()
    if dist.get_rank() == 0:
        (run / "latest").unlink()
    dist.barrier()
    said = told(lambda: check(engine.load_checkpoint(str(run)) == (None, None), "without latest, as DeepSpeed"))
    check(dist.get_rank() > 0 or "'second' is the last" in said[0], f"but tags are told of: {said}")
    error = error_of(lambda: engine.load_checkpoint(str(run), tag=own))
    check(isinstance(error, LoadFailed) and "rank 1" in str(error) and "loads 'second'" in str(error), f"{error}")
    other = engine_of(settings(3), EXACT)
    error = error_of(lambda: other.load_checkpoint(str(run), tag="first"))
    said = str(error)
    check(isinstance(error, LoadFailed) and "another ZeRO stage" in said and "(assert " in said, f"stages: {error}")


def urls(run: Path) -> None:
    """Tags lie on file systems: URLs are refused on all ranks, and not taken for paths below the working directory."""
    rank, before = dist.get_rank(), os.getcwd()
    run.mkdir(exist_ok=True)
    os.chdir(run)
    engine = engine_of(settings(2), EXACT)
    train(engine, 0, 1)
    for url in ("s3://bucket/run", "memory://run", f"file://{run}/run"):
        for call in (engine.save_checkpoint, engine.save_16bit_model, engine.load_checkpoint):
            error = error_of(partial(call, url))
            check(isinstance(error, ConfigError) and f"'{url}'" in str(error) and "dsq cp" in str(error), f"{error}")
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        error = error_of(partial(call, "memory://run" if rank else str(run / "run")))
        texts = everywhere(str(error))
        check(isinstance(error, DSQError) and "ConfigError" in texts[0] and "memory" in texts[0], f"one rank: {texts}")
    check(set(names(run)) <= {"run"}, f"nothing was written: {names(run)}")
    engine.save_checkpoint("run", tag="a")
    check(engine.load_checkpoint("run")[0] is not None, "and the next save succeeds")
    os.chdir(before)


def full_disks(run: Path) -> None:
    """A rank that cannot write: its error names rank, file and how far it was, and no directory is left."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    engine = engine_of(settings(2), LOSSY)
    train(engine, 0, 1)
    engine.save_checkpoint(str(run), tag="whole")
    whole = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = {"large": bytes(200_000)}  # in the file of rank 0 alone
    for victim, limit, file in ((1, 64, ".dsq"), (1, 9000, ".dsq"), (0, 100_000, "mp_rank_00_model_states.pt")):
        begin_new_process()
        if dist.get_rank() == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, whole[1]))
        error = error_of(lambda: engine.save_checkpoint(str(run), tag="broken", client_state=large))
        resource.setrlimit(resource.RLIMIT_FSIZE, whole)
        texts = everywhere(str(error))
        check(isinstance(error, SaveFailed), f"{limit} bytes: all ranks fail: {texts[victim]}")
        named = all(f"rank {victim}" in text and f"'{run / 'broken'}/" in text and file in text for text in texts)
        check(named and "written" in texts[victim] and "File too large" in texts[victim], f"and say where: {texts}")
        check(not (run / "broken").exists(), "no directory is left")
    engine.save_checkpoint(str(run), tag="broken")
    check(Manifest.read(run / "broken").ranks == 2, "the next save of that tag succeeds")
    error = error_of(lambda: engine.save_checkpoint(str(run), tag="odd", client_state={"bad": lambda: 1}))
    check("rank 0" in everywhere(str(error))[1] and "'bad'" in str(error), f"client_state: {error}")
    cyclic: dict[str, Any] = {"steps": 1}
    cyclic["self"] = [cyclic]
    for name, value, cause in (("cycle", cyclic, "contains itself"), ("raises", Raises(), "no pickling here")):
        state = {"fine": 1, name: value}
        error = error_of(partial(engine.save_checkpoint, str(run), tag="odd", client_state=state))
        check(f"'{name}' of" in str(error) and cause in str(error) and "'fine'" not in str(error), f"{name}: {error}")
    check(not (run / "odd").exists() and (run / "latest").read_text() == "broken", "and nothing of it is left")
    copied = run / "latest of a copy by cp -al"
    if dist.get_rank() == 0:
        os.link(run / "latest", copied)
    dist.barrier()
    engine.save_checkpoint(str(run), tag="later")
    check((run / "latest").read_text() == "later" and copied.read_text() == "broken", "a linked copy keeps its latest")


class Raises:
    def __reduce__(self) -> str:
        raise ValueError("no pickling here")


def files_beside_tags(run: Path) -> None:
    """Rank 0 alone writes `latest` and DeepSpeed's scripts: all ranks fail if it cannot, and none waits."""
    engine = engine_of(settings(2), LOSSY)
    train(engine, 0, 1)
    engine.save_checkpoint(str(run), tag="whole")

    def fails(source: Any, *arguments: Any) -> Any:
        raise OSError(28, "No space left on device", str(source))

    of_deepspeed = sys.modules["deepspeed.runtime.engine"]
    for place, name, directory in ((of_deepspeed, "copyfile", run / "new"), (of_tags, "AtomicFile", run)):
        original = getattr(place, name)
        setattr(place, name, fails)
        error = error_of(partial(engine.save_checkpoint, str(directory), tag="next"))
        setattr(place, name, original)
        texts = everywhere(str(error))
        told = isinstance(error, SaveFailed) and all("rank 0" in text and "No space left" in text for text in texts)
        check(told, f"{name}: all ranks fail: {texts}")
    check(list((run / "new").iterdir()) == [] and (run / "latest").read_text() == "whole", "files are whole or absent")
    engine.save_checkpoint(str(run), "later", {}, False)
    check((run / "latest").read_text() == "whole", "save_latest=False")
    engine.save_checkpoint(str(run), tag="of rank 0", save_latest=dist.get_rank() == 0)
    check((run / "latest").read_text() == "of rank 0", "of save_latest rank 0 decides")
    pointer = run / "pointer"
    if dist.get_rank() == 0:
        (run / "latest").rename(pointer)
        (run / "latest").symlink_to("pointer")
        pointer.chmod(0o664)
        (run / "zero_to_fp32.py").write_text("of another version")
        (run / "zero_to_fp32.py").chmod(0o775)
    dist.barrier()
    engine.save_checkpoint(str(run), tag="linked")
    modes = [file.stat().st_mode & 0o777 for file in (pointer, run / "zero_to_fp32.py")]
    whole = (run / "latest").is_symlink() and pointer.read_text() == "linked" and modes == [0o664, 0o775]
    check(whole and (run / "zero_to_fp32.py").stat().st_size > 1000, f"modes and links stay: {modes}")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(result: Any) -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGINT)

    engine = engine_of(settings(2), LOSSY, on_save=interrupt)
    train(engine, 0, 1)
    raised = error_of(partial(engine.save_checkpoint, str(run), tag="interrupted"))
    kind: type[BaseException] = SaveFailed if dist.get_rank() else KeyboardInterrupt
    signal.signal(signal.SIGINT, before)
    check(isinstance(raised, kind), f"a signal between commit and latest ends all ranks: {everywhere(repr(raised))}")
    check((run / "latest").read_text() == "interrupted", "and the tag that is complete is the latest")


def unreadable(run: Path) -> None:
    """A rank alone cannot read what all of them look at: all get the error, none waits for another."""
    engine = engine_of(settings(2), EXACT)
    train(engine, 0, 1)
    engine.save_checkpoint(str(run / "one"), tag="a")

    def fails(*arguments: Any) -> Any:
        raise OSError(5, "Input/output error")

    places: list[tuple[Any, str, Any, Any]] = [
        (of_tags.Path, "read_text", LoadFailed, lambda: engine.load_checkpoint(str(run / "one"))),
        (of_tags, "is_complete", LoadFailed, lambda: engine.load_checkpoint(str(run / "one"))),
        (of_engine, "is_complete", LoadFailed, lambda: engine.load_checkpoint(str(run / "one"))),
        (of_engine, "is_complete", SaveFailed, lambda: engine.save_checkpoint(str(run / "two"), tag="b")),
    ]
    for place, name, expected, call in places:
        original = getattr(place, name)
        if dist.get_rank() == 1:
            setattr(place, name, fails)
        error = error_of(call)
        setattr(place, name, original)
        texts = everywhere(str(error))
        told = isinstance(error, expected) and all("rank 1" in text and "Input/output" in text for text in texts)
        check(told, f"{name}: {expected.__name__} on all ranks: {texts}")
    dist.barrier()
    read_text = Path.read_text
    if dist.get_rank() == 1:
        of_tags.Path.read_text = absent
    error = error_of(lambda: engine.load_checkpoint(str(run / "one")))
    of_tags.Path.read_text = read_text
    check(isinstance(error, LoadFailed) and "rank 1 on host" in str(error), f"latest is not shared: {error}")
    engine.save_checkpoint(str(run / "two"), tag="b")
    check(Manifest.read(run / "two" / "b").ranks == 2, "the next save succeeds")


def absent(*arguments: Any) -> str:
    raise FileNotFoundError


def misspelt(run: Path) -> None:
    """`install` and the launcher tell what was meant, and remind at the first save where nothing was."""
    dsq_ckpt.deepspeed.install()

    def plain(**extra: Any) -> Any:
        model, tree = Model(), {**settings(0), **extra}
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=tree)[0]

    first = dist.get_rank() == 0
    for block in ({"dsq_ckpt": {}}, {"dsq-checkpoint": {}}, {"dqs_checkpoint": {}}, {"checkpoint": {"dsq_ckpt": {}}}):
        said = told(partial(plain, **block))
        name = next(iter(block)) if "checkpoint" not in block else "checkpoint.dsq_ckpt"
        check(not first or (len(said) == 1 and f"'{name}'" in said[0] and "'dsq_checkpoint'" in said[0]), f"{said}")
    for enabled in (True, False):
        said = told(partial(plain, dsq_ckpt={}, dsq_checkpoint={"enabled": enabled}))
        check(not first or len(said) == 1, f"beside the block too: {said}")
    dsq_ckpt.deepspeed._block_flags.clear()
    engine = plain()
    said = [told(partial(engine.save_checkpoint, str(run), tag=tag)) for tag in ("a", "b")]
    check(not first or ["no block 'dsq_checkpoint'" in text for text in said[0]] == [True], f"the first save: {said}")
    check(said[1] == [], "and only that")
    engine = plain()
    plain(dsq_checkpoint={"enabled": False})
    check(told(partial(engine.save_checkpoint, str(run), tag="c")) == [], "not where another engine has the block")


def main() -> None:
    directory = begin()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for part in [globals()[name] for name in sys.argv[2:]] or (
        tags_by_rank, missing_tags, urls, full_disks, files_beside_tags, unreadable, misspelt
    ):
        part(directory / part.__name__)
    end()


if __name__ == "__main__":
    main()
