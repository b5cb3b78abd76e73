"""Compressed checkpoints for DeepSpeed, enabled by a block in its configuration.

    "dsq_checkpoint": {"enabled": true, "search": {...}, "quantize": {...}, "delta": {...}}

`initialize` replaces `deepspeed.initialize`; `attach` extends an existing engine; `install` makes every new engine of
this process read the block. `python -m dsq_ckpt.launch train.py` calls `install` before it runs a script.

    log = dsq_ckpt.deepspeed.gradient_log(engine, "run")
    ...
    engine.step(); log.step()

`gradient_log` logs the gradients of every step, and `recover` restores an engine to the state after the last step.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dsq_ckpt.api.compressor import fractions_of, weighs_elements
from dsq_ckpt.config.renamed import current_keys
from dsq_ckpt.config.schema import DSQConfig
from dsq_ckpt.core.arguments import expect_folds, expect_on_save
from dsq_ckpt.core.notices import warn
from dsq_ckpt.deepspeed.tags import list_tags
from dsq_ckpt.distributed.comm import TorchCommunicator, get_group_timeout
from dsq_ckpt.engine.result import OnSave
from dsq_ckpt.errors import ConfigError
from dsq_ckpt.quantization.plan import ConfigPolicy, plan_as_configured
from dsq_ckpt.search.folds import check_same_functions

if TYPE_CHECKING:
    from dsq_ckpt.deepspeed.engine import DSQCheckpointEngine
    from dsq_ckpt.deepspeed.log import gradient_log, recover

BLOCK = "dsq_checkpoint"
"""The key of the block in DeepSpeed's configuration."""

_MISSING_BLOCK = f"the configuration has no block '{BLOCK}'"
_SIMILARITY_CUTOFF = 0.8  # includes `dqs_checkpoint`, but not DeepSpeed's own `checkpoint`
_block_flags: list[bool] = []  # for each engine since `install`: whether its configuration has the block
Evaluate = Callable[[], float]


def initialize(
    *args: Any, evaluate: Evaluate | None = None, check: Evaluate | None = None, on_save: OnSave | None = None,
    **kwargs: Any,
) -> tuple[Any, Any, Any, Any]:
    """Call `deepspeed.initialize`, and call `attach` if the configuration has the block `dsq_checkpoint`.

    Args:
        args: positional arguments of `deepspeed.initialize`.
        evaluate, check, on_save: see `attach`.
        kwargs: keyword arguments of `deepspeed.initialize`.

    Returns:
        Engine, optimizer, data loader and scheduler, as from `deepspeed.initialize`.

    Raises:
        ConfigError: the block has unknown keys or invalid values (the message names all), or `evaluate` or `check` is
            not a function.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> config = {
        ...     "train_micro_batch_size_per_gpu": 4, "dsq_checkpoint": {"enabled": True},
        ...     "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        ... }
        >>> engine, *_ = dsq_ckpt.deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        >>> loss = engine(torch.randn(4, 64)).square().mean()
        >>> loss = engine.backward(loss)
        >>> engine.step()
        >>> saved = engine.save_checkpoint("run")
        >>> dsq_ckpt.latest("run")
        'run/global_step1'
    """
    expect_folds(evaluate, check)
    expect_on_save(on_save)
    deepspeed = _import_deepspeed()
    if isinstance(tree := kwargs.get("config"), dict):
        parse_block(tree, silent=True)  # raise errors before the engine is built
    result: tuple[Any, Any, Any, Any] = deepspeed.initialize(*args, **kwargs)
    tree = result[0]._config._param_dict
    if parse_block(tree, silent=True) is not None:
        attach(result[0], evaluate=evaluate, check=check, on_save=on_save)
    elif not _warn_similar_keys(tree) and tree.get(BLOCK) is None:
        warn(f"{_MISSING_BLOCK}: checkpoints are DeepSpeed's own", rank=dist.get_rank())
    return result


def attach(
    engine: Any, config: DSQConfig | dict[str, Any] | None = None, evaluate: Evaluate | None = None,
    check: Evaluate | None = None, on_save: OnSave | None = None,
) -> None:
    """Make an engine write compressed checkpoints, and read compressed and plain checkpoints; collective.

    Args:
        engine: DeepSpeed engine.
        config: configuration with the keys of the block `dsq_checkpoint`; None for the engine's block, or the defaults.
        evaluate: collective function that returns the metric of the engine's current model, as for
            `dsq_ckpt.Compressor`. Each save then searches for the smallest configuration within the bounds of
            `config.search`.
        check: function that returns the same metric on other batches, as for `dsq_ckpt.Compressor`; the chosen
            configuration must keep the bounds on these, too.
        on_save: function that is called with the `SaveResult` of each tag on rank 0, once the tag is complete, before
            `latest` names it. An exception that it raises becomes a warning.

    Raises:
        ConfigError: an argument or the configuration is invalid, or ranks do not share the storage.
        SaveFailed: on all ranks, if only some ranks pass `evaluate` or `check`.
    """
    expect_folds(evaluate, check)
    expect_on_save(on_save)
    _import_deepspeed()
    from dsq_ckpt.deepspeed.engine import DSQCheckpointEngine
    from dsq_ckpt.deepspeed.gradients import FlatGradients

    _warn_similar_keys(engine._config._param_dict)
    dsq_config = parse_block(engine._config._param_dict) or DSQConfig() if config is None else _as_config(config)
    if engine.use_node_local_storage():
        raise ConfigError(
            f"{BLOCK} needs a directory that all nodes share, and checkpoint.use_node_local_storage is true; set it to "
            "false, and save to shared storage"
        )
    if evaluate is not None and dsq_config.search.parallel_trials:
        raise ConfigError(
            f"{BLOCK}.search.parallel_trials is true, but ranks of DeepSpeed hold parts of one model and evaluate it "
            "together; leave parallel_trials out"
        )
    inner = engine.checkpoint_engine
    if isinstance(inner, DSQCheckpointEngine):
        group, inner = inner.group, inner.inner
    else:
        group = dist.new_group(backend="gloo", timeout=get_group_timeout(dist.group.WORLD))
    check_same_functions(evaluate, check, TorchCommunicator(group), lambda: None)
    gradients = None
    if weighs_elements(dsq_config) and engine.basic_optimizer is not None:
        gradients = FlatGradients(engine, dsq_config.search, fractions_of(dsq_config))
    engine.checkpoint_engine = DSQCheckpointEngine(
        engine, inner, dsq_config, group, _create_policy(engine, evaluate, check), gradients, on_save
    )
    _wrap_save_checkpoint(engine)
    _wrap_load_checkpoint(engine)


def install() -> None:
    """Make every future engine write compressed checkpoints if its configuration has the block.

    Use this for scripts in which `deepspeed.initialize` is called by the script itself, or by Hugging Face's Trainer or
    Accelerate.
    """
    _import_deepspeed()
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine._configure_checkpointing
    if getattr(original, "_dsq_ckpt", False):
        return

    @functools.wraps(original)
    def configure_checkpointing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        tree = self._config._param_dict
        _block_flags.append(tree.get(BLOCK) is not None)
        if parse_block(tree, silent=True) is not None:
            attach(self)
        elif not _warn_similar_keys(tree) and not _block_flags[-1]:
            _warn_on_first_save(self)
        return result

    configure_checkpointing._dsq_ckpt = True  # type: ignore[attr-defined]
    DeepSpeedEngine._configure_checkpointing = configure_checkpointing


def _warn_on_first_save(engine: Any) -> None:
    """Warn at the first save of an engine without the block, unless another engine of this process has the block."""
    original = engine.save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        del engine.save_checkpoint  # restores the method of the class
        if not any(_block_flags):
            warn(f"{_MISSING_BLOCK}: checkpoints are DeepSpeed's own", rank=dist.get_rank())
        return original(*args, **kwargs)

    engine.save_checkpoint = save_checkpoint


def get_block_flags() -> list[bool]:
    """Return, for each engine since `install`, whether its configuration has the block, enabled or not."""
    return list(_block_flags)


def _warn_similar_keys(tree: dict[str, Any]) -> bool:
    """Warn about keys that resemble the block's name; return whether there are such keys."""
    similar_keys = {key for key in tree if isinstance(key, str) and key != BLOCK and _is_similar(key)}
    inner = tree.get("checkpoint")
    similar_keys |= {f"checkpoint.{key}" for key in inner if _is_similar(key)} if isinstance(inner, dict) else set()
    if similar_keys:
        warn(
            f"DeepSpeed's configuration has {' and '.join(map(repr, sorted(similar_keys)))}, which nothing reads; the "
            f"block of dsq_ckpt is called '{BLOCK}' and lies at the top level"
            + ("" if BLOCK in tree else ": checkpoints are DeepSpeed's own"), rank=dist.get_rank(),
        )
    return bool(similar_keys)


def _is_similar(key: str) -> bool:
    letters = re.sub(r"[^a-z]", "", key.lower())
    if letters == "checkpoint":
        return False
    matches = difflib.get_close_matches(BLOCK.replace("_", ""), [letters], 1, _SIMILARITY_CUTOFF)
    return letters.startswith("dsq") or bool(matches)


def quality(engine: Any) -> dict[str, Any] | None:
    """Return the measurements of the search for the engine's last checkpoint, or None without a search."""
    checkpoint_engine: DSQCheckpointEngine = engine.checkpoint_engine
    return getattr(checkpoint_engine, "quality", None)


def _wrap_save_checkpoint(engine: Any) -> None:
    """Make `engine.save_checkpoint` pass `client_state` to the checkpoint engine, which writes `latest` and scripts.

    DeepSpeed merges `client_state` with its own state. It writes the files beside tags on rank 0 only, where a failure
    would leave the other ranks waiting.
    """
    original, checkpoint_engine = type(engine).save_checkpoint, engine.checkpoint_engine

    def save_checkpoint(
        save_dir: str, tag: str | None = None, client_state: dict[Any, Any] | None = None, save_latest: bool = True,
        *args: Any, **kwargs: Any,
    ) -> Any:
        client_state = {} if client_state is None else client_state
        if engine.checkpoint_engine is not checkpoint_engine:
            return original(engine, save_dir, tag, client_state, save_latest, *args, **kwargs)
        with checkpoint_engine.save_context(client_state, save_latest):
            return original(engine, save_dir, tag, client_state, False, *args, **kwargs)

    engine.save_checkpoint = functools.wraps(original)(save_checkpoint)


def _wrap_load_checkpoint(engine: Any) -> None:
    """Make `engine.load_checkpoint` verify a tag on all ranks before the engine loads it, and record the loaded tag."""
    original = type(engine).load_checkpoint

    def load_checkpoint(load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        latest = "latest_universal" if engine.load_universal_checkpoint() else "latest"
        tag = engine.checkpoint_engine.resolve_tag(load_dir, latest, tag)
        if tag is None:
            if tags := list_tags(load_dir):
                warn(
                    f"'{load_dir}' has tags ('{tags[-1]}' is the last), but no '{latest}' that says which to "
                    "load, so DeepSpeed loads nothing; pass tag=", rank=dist.get_rank(),
                )
            return original(engine, load_dir, tag, *args, **kwargs)
        with engine.checkpoint_engine.load_context(load_dir, tag):
            return original(engine, load_dir, tag, *args, **kwargs)

    engine.load_checkpoint = functools.wraps(original)(load_checkpoint)


def _create_policy(engine: Any, evaluate: Evaluate | None, check: Evaluate | None) -> ConfigPolicy:
    if evaluate is None:
        return plan_as_configured
    from dsq_ckpt.deepspeed.weight_refresh import create_refresh
    from dsq_ckpt.search.manager import ConfigManager

    return ConfigManager(engine.module, evaluate, refresh=create_refresh(engine), check=check)


def parse_block(settings: dict[str, Any], *, silent: bool = False) -> DSQConfig | None:
    """Return the parsed block of a DeepSpeed configuration, or None if the block is missing or not enabled.

    Args:
        settings: DeepSpeed's configuration.
        silent: do not warn about former keys; False only for the call whose result is used.

    Raises:
        ConfigError: the block has unknown keys or invalid values; the message names all.
    """
    tree = settings.get(BLOCK)
    if tree is None:
        return None
    if not isinstance(tree, dict):
        raise ConfigError(f"{BLOCK}: {type(tree).__name__} found, expected an object such as {{\"enabled\": true}}")
    for key in get_close_matches("enabled", tree.keys() - {"enabled", *DSQConfig.model_fields}, 1):
        raise ConfigError(f"{BLOCK}.{key}: unknown key; did you mean 'enabled'?")
    enabled = tree.get("enabled", True)
    if not isinstance(enabled, bool):
        raise ConfigError(f"{BLOCK}.enabled: {enabled!r} found, expected true or false")
    block = {key: value for key, value in tree.items() if key != "enabled"}
    config = _as_config(current_keys(block, silent=True) if silent else block)
    return config if enabled else None


def _as_config(config: DSQConfig | dict[str, Any]) -> DSQConfig:
    try:
        return DSQConfig.create(config)
    except ConfigError as error:
        raise ConfigError(str(error).replace("configuration", BLOCK, 1)) from None


def __getattr__(name: str) -> Any:
    """Import `gradient_log` and `recover` on first use, since checkpoints do not need them."""
    if name in ("gradient_log", "recover"):
        return getattr(importlib.import_module("dsq_ckpt.deepspeed.log"), name)
    raise AttributeError(f"module 'dsq_ckpt.deepspeed' has no attribute {name!r}")


def _import_deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError("dsq_ckpt.deepspeed needs DeepSpeed: pip install deepspeed") from error
    return deepspeed


__all__ = ["BLOCK", "attach", "gradient_log", "initialize", "install", "quality", "recover"]
