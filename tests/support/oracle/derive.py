"""Derives the table's cells from one wheel: resolve the server arguments, build the MoE block, call its TopK."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import inspect
import logging
import re
import sys
import tempfile
import types
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec.structs

from tests.support.oracle.machine import INSTALLED, LEAVES, MISSING, RUN, Tensor, known
from tests.support.oracle.served import MODELS, QUANTIZATIONS, Served
from tests.support.oracle.standins import LeafReached, Standin, Wheel, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_TOKENS = 16
_FORMATS = {"BypassedTopKOutput": "BYPASSED", "TritonKernelTopKOutput": "TRITON_KERNEL"}
_READ = {
    "moe_runner_backend": "backend",
    "quantization": "quantization",
    "disable_shared_experts_fusion": "fusion_off",
}


@dataclass(frozen=True)
class Cell:
    """One server, and what the release does with it.

    Attributes:
        model: one of `MODELS`.
        quantization: one of `QUANTIZATIONS`.
        backend: what --moe-runner-backend was given; None if the release has no such flag.
        fusion: False with --disable-shared-experts-fusion.
        refused: why the release does not start so; the rest is empty then.
        resolved_backend: the runner backend in the resolved server arguments.
        resolved_quantization: likewise.
        resolved_fusion_off: likewise, --disable-shared-experts-fusion.
        fused: shared experts fused into the routed ones.
        format: what TopK gives: STANDARD, BYPASSED, TRITON_KERNEL; "none" if the block has no TopK.
        selects: whether select_experts was called.
        leaf: the first function called that computes the choice; empty if select_experts was not called.
    """

    model: str
    quantization: str
    backend: str | None
    fusion: bool
    refused: str = ""
    resolved_backend: str | None = None
    resolved_quantization: str | None = None
    resolved_fusion_off: bool | None = None
    fused: int | None = None
    format: str = ""
    selects: bool = False
    leaf: str = ""


class Config:
    """A model's configuration object: attributes, and nothing where config.json has nothing."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)

    def get_text_config(self) -> Config:
        """Itself: none of the table's models has a text part."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Its fields."""
        return dict(self.__dict__)

    def get(self, name: str, default: Any = None) -> Any:
        """A field."""
        return self.__dict__.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__


class Release:
    """A wheel, imported on the machine that `machine.py` describes."""

    def __init__(self, wheel: Path, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.config: Config | None = None
        self.globals: dict[str, Any] = {}
        self.world = World(known(capability) | self._known(), LEAVES)
        self.finder = Wheel(wheel, self.world, RUN, INSTALLED, MISSING)
        sys.meta_path.insert(0, self.finder)
        sys.modules["regex"] = re
        # It reads a class's annotations anew each time, and the later releases ask for every field.
        msgspec.structs.fields = functools.cache(msgspec.structs.fields)
        importlib.metadata.version = lambda distribution_name: "99.0"  # noqa: ARG005 - its name
        self.server_args = importlib.import_module("sglang.srt.server_args")
        logging.disable(logging.CRITICAL)
        fields = vars(self.server_args.ServerArgs).get("__annotations__", {})
        self.fusion_flag = "disable_shared_experts_fusion" if "disable_shared_experts_fusion" in fields else ""
        self.globals.update({name: getattr(self.server_args.ServerArgs, name, None) for name in fields})
        topk: Any = importlib.import_module("sglang.srt.layers.moe.topk")
        topk.select_experts = self._watched(topk.select_experts)
        self.selecting = False
        self.turn = capability[0]
        self.model_path = tempfile.mkdtemp()

    def _watched(self, select_experts: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.selecting = True
            return select_experts(*args, **kwargs)

        return watched

    def close(self) -> None:
        """Forget the wheel's modules and the stand-ins."""
        sys.meta_path.remove(self.finder)
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            if spec is not None and spec.loader is self.finder:
                del sys.modules[name]

    def _known(self) -> dict[str, Any]:
        return {
            "*.get_config": lambda *_, **__: self.config,
            "*.get_hf_text_config": lambda config, *_: config,
            "*.get_generation_config": lambda *_, **__: None,
            "*.get_context_length": lambda *_: 131072,
            "*.global_server_args_dict": self.globals,
        }

    def backends(self) -> list[str | None]:
        """The choices of --moe-runner-backend, by the release's own parser; [None] if it has no such flag."""
        parser = argparse.ArgumentParser()
        self.server_args.ServerArgs.add_cli_args(parser)
        found = [action for action in parser._actions if action.dest == "moe_runner_backend"]
        return list(found[0].choices) if found and found[0].choices else [None]

    def cells(self, *, quick: bool = False) -> Iterator[Cell]:
        """Every cell of the table that this release has on this GPU.

        Args:
            quick: of the explicit backends, one for each model and quantization, another one each time.
        """
        backends = self.backends()
        for model, served in MODELS.items():
            module = self._module(f"sglang.srt.models.{served.module}")
            if module is None or isinstance(getattr(module, served.architecture, None), Standin | None):
                continue
            for quantization in QUANTIZATIONS:
                for backend in self._some(backends) if quick else backends:
                    yield self.cell(Cell(model, quantization, backend, fusion=True))
                    # Switching fusion off has nothing to do with the backend: with two of them it is enough.
                    if self.fusion_flag and backend in {None, "auto", "triton"}:
                        yield self.cell(Cell(model, quantization, backend, fusion=False))

    def _some(self, backends: list[str | None]) -> list[str | None]:
        # Over the models, quantizations, releases and GPUs of the table, each backend has its turn many times.
        explicit = [one for one in backends if one not in {None, "auto"}]
        self.turn += 5 if len(explicit) % 5 else 7
        plain = [one for one in backends if one in {None, "auto"}]
        return [*plain, explicit[self.turn % len(explicit)]] if explicit else plain

    def _module(self, name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            return None

    def cell(self, asked: Cell) -> Cell:
        """What the release does with one server."""
        served = MODELS[asked.model]
        declared, typed = QUANTIZATIONS[asked.quantization]
        self.config = Config({**served.config, **({"quantization_config": dict(declared)} if declared else {})})
        given: dict[str, Any] = {"model_path": self.model_path}
        given |= {} if asked.fusion else {self.fusion_flag: True}
        given |= {"quantization": typed} if typed else {}
        given |= {"moe_runner_backend": asked.backend} if asked.backend else {}
        try:
            args = self.server_args.ServerArgs(**given)
            if hasattr(args, "resolve_once"):
                args.resolve_once()
            got = self.resolved(args)
            facts = {f"resolved_{short}": got[name] for name, short in _READ.items()}
            facts |= self.run(served, args)
        except AttributeError as crash:
            # 0.5.2 to 0.5.4 ask a quantization config for its name where there is none; no other crash is theirs.
            if str(crash) != "'NoneType' object has no attribute 'get_name'":
                raise
            return Cell(**{**asdict(asked), "refused": f"crashes: {crash}"})
        except (AssertionError, ValueError, NotImplementedError) as refusal:
            return Cell(**{**asdict(asked), "refused": f"{type(refusal).__name__}: {refusal}"[:300]})
        return Cell(**{**asdict(asked), **facts})

    def resolved(self, args: Any) -> dict[str, Any]:
        """The server arguments as the release resolved them."""
        overrides: Any = sys.modules.get("sglang.srt.arg_groups.overrides")
        view = overrides.resolved_view(args) if hasattr(overrides, "resolved_view") else args
        return {name: getattr(view, name, None) for name in _READ}

    def publish(self, args: Any) -> None:
        """Make the server arguments what the model code reads."""
        for name, module in list(sys.modules.items()):
            if name.startswith("sglang.srt.layers.moe.") and name in self.finder.ran:
                for one in vars(module).values():
                    if isinstance(one, functools._lru_cache_wrapper):
                        one.cache_clear()  # a server asks once in its life
        self.globals.update(vars(args))
        context = self._module("sglang.srt.runtime_context")
        if hasattr(context, "publish"):
            ranks = "ranks" in inspect.signature(context.publish).parameters
            bundle = {"ranks": context.SpawnRanks(world_rank=0, gpu_id=0, dp_rank=None)} if ranks else {}
            context.publish(args, role="scheduler", hf_config=self.config, **bundle)
            if ranks:
                names = ("tp_group", "pp_group", "attn_tp_group", "moe_tp_group", "moe_ep_group", "world_group")
                one = types.SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, rank_in_group=0)
                context.get_parallel().override_permanently(**dict.fromkeys(names, one))
        elif hasattr(self.server_args, "set_global_server_args_for_scheduler"):
            self.server_args.set_global_server_args_for_scheduler(args)
        utils = self._module("sglang.srt.layers.moe.utils")
        if hasattr(utils, "MoeA2ABackend") and not hasattr(utils, "initialize_moe_config"):
            # As the model runner of 0.4.10.post2 writes it.
            self.globals["moe_a2a_backend"] = utils.MoeA2ABackend(args.moe_a2a_backend)
        if hasattr(utils, "initialize_moe_config"):
            initialize = utils.initialize_moe_config
            initialize(args) if inspect.signature(initialize).parameters else initialize()

    def quantization(self, args: Any) -> Any:
        """The quantization config that the loader would build."""
        model_config = importlib.import_module("sglang.srt.configs.model_config").ModelConfig
        if hasattr(model_config, "from_server_args"):
            name = model_config.from_server_args(args).quantization
        else:
            name = model_config(
                model_path=self.model_path, quantization=args.quantization, model_override_args="{}"
            ).quantization
        if name is None:
            return None
        found = importlib.import_module("sglang.srt.layers.quantization").get_quantization_config(name)
        declared = self.config.get("quantization_config")  # type: ignore[union-attr]
        # As model_loader/weight_utils.py get_quant_config does for a method that has no file of its own.
        return found() if declared is None else found.from_config(declared)

    def run(self, served: Served, args: Any) -> dict[str, Any]:
        """Build the model's MoE block and call its TopK."""
        self.publish(args)
        quant_config = self.quantization(args)
        utils = self._module("sglang.srt.layers.moe.utils")
        model = getattr(self._module(f"sglang.srt.models.{served.module}"), served.architecture)
        if hasattr(utils, "install_shared_experts_fusion_decision"):  # as the loader of 0.5.18 to 0.5.22 does
            utils.install_shared_experts_fusion_decision(model, self.config, quant_config)
        if not hasattr(utils, "resolve_shared_experts_config"):
            return {"fused": self.fused(served, quant_config)} | self.call(served, quant_config)
        shared = utils.resolve_shared_experts_config(model, self.config, quant_config)
        with importlib.import_module("sglang.srt.runtime_context").get_model().override(shared_experts=shared):
            return {"fused": shared.num_fused_shared_experts} | self.call(served, quant_config)

    def fused(self, served: Served, quant_config: Any) -> int:
        """How many shared experts the model fuses, after its own constructor has decided."""
        module = importlib.import_module(f"sglang.srt.models.{served.module}")
        builder = importlib.import_module(f"sglang.srt.models.{served.block_module}")
        # The layers are not wanted, only what is decided before they are made.
        getattr(builder, served.inner).__init__ = lambda *_, **__: None
        model = getattr(module, served.architecture)(self.config, quant_config)
        held = vars(model)
        return int(held.get("num_fused_shared_experts", held.get("n_share_experts_fusion")) or 0)

    def call(self, served: Served, quant_config: Any) -> dict[str, Any]:
        """Build the MoE block, and call what chooses its experts."""
        module = importlib.import_module(f"sglang.srt.models.{served.block_module}")
        build = getattr(module, served.block)
        wanted = {"config": self.config, "layer_id": 10, "quant_config": quant_config, "prefix": "model.layers.10.mlp"}
        takes = inspect.signature(build).parameters
        block = build(**{name: value for name, value in wanted.items() if name in takes})
        rows = Tensor(_TOKENS, served.config["hidden_size"], dtype="bfloat16")
        logits = Tensor(_TOKENS, served.config.get("n_routed_experts") or served.config["num_experts"], dtype="float32")
        topk = vars(block).get("topk")
        self.world.armed, self.selecting = True, False
        try:
            if topk is not None:
                out = type(topk.forward_cuda(rows, logits)).__name__
            else:
                out = type(block.experts.forward(hidden_states=rows, router_logits=logits)).__name__
        except LeafReached as reached:
            if self.selecting:
                return {"format": "STANDARD", "selects": True, "leaf": reached.name}
            return {"format": "TRITON_KERNEL" if reached.name.startswith("triton_kernels.") else reached.name}
        finally:
            self.world.armed = False
        return {"format": _FORMATS.get(out, out), "selects": self.selecting}
