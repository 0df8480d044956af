"""The machine that the stand-ins describe: one GPU, CUDA, and the libraries that sglang wants there."""

from __future__ import annotations

import enum
import types
from typing import Any

from tests.support.oracle.standins import ABSENT, Base, LeafReached, by_tensors

# The wheel's modules that decide something and are run; every other module of sglang is a stand-in.
RUN = (
    "sglang.srt.server_args",
    "sglang.srt.arg_groups",
    "sglang.srt.arg_groups.*",
    "sglang.srt.environ",
    "sglang.srt.runtime_context",
    "sglang.srt.platforms",
    "sglang.srt.platforms.*",
    "sglang.srt.utils",
    "sglang.srt.utils.common",
    "sglang.srt.configs.model_config",
    "sglang.srt.configs.shared_experts",
    "sglang.srt.model_executor.cuda_graph_config",
    "sglang.kernels.fused_op",
    "sglang.srt.custom_op",
    "sglang/srt/layers/utils.py",  # the module of 0.4; later a package
    "sglang.srt.layers.utils.multi_platform",
    "sglang.srt.layers.moe",
    "sglang.srt.layers.moe.topk",
    "sglang.srt.layers.moe.utils",
    "sglang.srt.layers.moe.hash_topk",
    "sglang.srt.layers.moe.ep_moe.layer",
    "sglang.srt.layers.moe.fused_moe_triton",
    "sglang.srt.layers.moe.fused_moe_triton.layer",
    "sglang.srt.layers.moe.route_quant_handoff",
    "sglang.srt.layers.moe.moe_runner",
    "sglang.srt.layers.moe.moe_runner.base",
    "sglang.srt.layers.quantization.fp8_utils",
    "sglang.srt.layers.quantization.utils",
    "sglang.srt.layers.quantization",
    "sglang.srt.layers.quantization.base_config",
    "sglang.srt.layers.quantization.fp8",
    "sglang.srt.layers.quantization.modelopt_quant",
    "sglang.srt.layers.quantization.unquant",
    "sglang.srt.models.*",
)
# Third-party packages that are really installed beside the tests.
INSTALLED = ("packaging", "typing_extensions", "msgspec", "tests")
MISSING = (
    *("aiter", "torch_npu", "torch_musa", "torch_xla", "habana_frameworks", "intel_extension_for_pytorch", "mlx"),
    *("torchada", "vllm", "quark", "deep_ep", "mooncake", "ktransformers", "kt_kernel"),
)
# What computes the choice of experts, or a part of it.
LEAVES = (
    *("sgl_kernel.", "flashinfer.", "triton_kernels.", "sglang.jit_kernel.", "sglang.kernels."),
    *("torch.topk", "torch.softmax", "torch.sigmoid", "torch.nn.functional.softmax", "torch.nn.functional.softplus"),
)

GPUS = {(9, 0): "NVIDIA H200", (10, 0): "NVIDIA B200", (12, 0): "NVIDIA RTX PRO 6000 Blackwell"}
_MEMORY_MB = 180_000


class Tensor(Base):
    """A torch tensor: a shape, a dtype, no values."""

    is_cuda = True
    device = "cuda"
    is_contiguous = staticmethod(lambda *_: True)

    def __init__(self, *shape: int, dtype: Any = None) -> None:
        super().__init__()
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)

    def size(self, dim: int | None = None) -> Any:
        """Its shape."""
        return self.shape if dim is None else self.shape[dim]

    def same(self, *_: object, **__: object) -> Tensor:
        """What keeps the shape."""
        return self

    def choose(self, *_: object, **__: object) -> None:
        """What computes with the values.

        Raises:
            LeafReached: with the name of the function in topk.py that does.
        """
        raise LeafReached(by_tensors())

    sigmoid = softmax = topk = choose
    to = float = contiguous = detach = clone = same
    dim = lambda self: self.ndim  # noqa: E731 - a method of one word
    numel = lambda self: __import__("math").prod(self.shape)  # noqa: E731 - same
    stride = lambda self, dim=0: self.shape[-1] if dim == 0 else 1  # noqa: E731 - same

    @property
    def data(self) -> Tensor:
        """Itself."""
        return self


class Module(Base):
    """torch.nn.Module: a thing with attributes."""

    def register_parameter(self, name: str, value: object, **_: object) -> None:
        """An attribute."""
        setattr(self, name, value)

    register_buffer = register_parameter


class Parameter(Tensor):
    """torch.nn.Parameter: as the tensor it is made of."""

    def __init__(self, data: Any = None, **_: object) -> None:
        super().__init__(*getattr(data, "shape", ()), dtype=getattr(data, "dtype", None))


class Linear(Module):
    """Any of sglang's linear layers: a weight of the model's dtype."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
        self.weight = Tensor(dtype="bfloat16")
        self.quant_method = Module()
        self.output_size_per_partition = 1024


class MoeRunner(Base):
    """sglang.srt.layers.moe.moe_runner.MoeRunner: knows the backend that the quantization method gave it."""

    def __init__(self, runner_backend: Any, *_: object, **__: object) -> None:
        super().__init__()
        self.runner_backend = runner_backend


LINEARS = (
    *("ColumnParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear"),
    *("QKVParallelLinear", "QKVParallelLinearWithLoRA", "MergedReplicatedLinear"),
)


def _empty(*shape: Any, dtype: Any = None, **_: object) -> Tensor:
    return Tensor(*(shape[0] if shape and isinstance(shape[0], tuple | list) else shape), dtype=dtype)


def _inputs(router_logits: Any, correction_bias: Any, info: object) -> tuple[Any, Any]:  # noqa: ARG001 - its name
    return router_logits, correction_bias


def _compile(function: Any = None, **_: object) -> Any:
    return function if function is not None else lambda one: one


class PretrainedConfig(Base):
    """transformers' base class of configurations."""


class ConnectorType(enum.Enum):
    """sglang.srt.connector.ConnectorType: where a model comes from; here from a folder."""

    INSTANCE = "instance"
    REDIS = "redis"
    S3 = "s3"
    FS = "fs"


def _no(*_: object, **__: object) -> bool:
    return False


def _none(*_: object, **__: object) -> None:
    return None


def known(capability: tuple[int, int]) -> dict[str, Any]:
    """What the stand-ins answer on that machine, by dotted name; `=name` stands for a function of sglang's.

    Args:
        capability: the GPUs' compute capability.
    """
    made = dict.fromkeys(("empty", "zeros", "ones", "full"), _empty)
    return {
        # The GPUs.
        "torch.cuda.is_available": lambda: True,
        "torch.version.cuda": "13.0",
        "torch.version.hip": None,
        "torch.version.xpu": None,
        "torch.version.musa": None,
        "torch.cuda.get_device_capability": lambda *_: capability,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.get_device_name": lambda *_: GPUS[capability],
        "torch.xpu.is_available": _no,
        "torch.cpu.is_available": lambda: True,
        "torch.backends.mps.is_available": _no,
        "torch._C._cpu._is_amx_tile_supported": _no,
        "torch.cpu._is_amx_tile_supported": _no,
        **{f"torch.{name}": ABSENT for name in ("npu", "musa", "hpu", "mps", "mlu")},
        "=get_nvgpu_memory_capacity": lambda: _MEMORY_MB,
        "=get_device_memory_capacity": lambda *_, **__: _MEMORY_MB,
        # torch.
        "torch.__version__": "2.9.1+cu130",
        "torch.Tensor": Tensor,
        "torch.nn.Module": Module,
        "torch.nn.Parameter": Parameter,
        "torch.nn.parameter.Parameter": Parameter,
        "*.MoeRunner": MoeRunner,
        "torch.compile": _compile,
        **{f"torch.{name}": function for name, function in made.items()},
        # Other libraries.
        "transformers.__version__": "5.3.0",
        "transformers.PretrainedConfig": PretrainedConfig,
        "flashinfer.__version__": "99.0",
        "*.OfflineModeIsEnabled": type("OfflineModeIsEnabled", (Exception,), {}),
        "*.cached_file": _none,
        # Parts of sglang that have no word in the choice of experts.
        "*.override_quantization_method": _none,
        "*.get_linear_attn_spec_by_arch": _none,
        "*.get_linear_attn_spec": _none,
        "*.resolve_embedding_model_spec": _none,
        "*.resolve_hf_gguf_reference": _none,
        "*.check_gguf_file": _no,
        "*.is_runai_obj_uri": _no,
        "*.use_mlx": _no,
        "*.pp_spec_stable_rows_enabled": _no,
        "*.is_in_ci": _no,
        "*.parse_connector_type": _none,
        "*.load_plugins_by_group": lambda *_: {},
        "*.CP_V2_DEFAULT_MODEL_CLASSES": frozenset(),
        "*.POINTER_ADAPTER_BASES": {},
        "*.REASONING_PARSER_NAMES": (),
        "*.TOOL_CALL_PARSER_NAMES": (),
        "*.DetectorMap": {},
        "*.ToolCallParserEnum": {},
        "*.RealKvHashMode": (),
        "*.ConnectorType": ConnectorType,
        "*.get_tensor_model_parallel_world_size": lambda: 1,
        "*.get_moe_tensor_parallel_world_size": lambda: 1,
        "*.get_moe_expert_parallel_world_size": lambda: 1,
        "*.get_tensor_model_parallel_rank": lambda: 0,
        "*.get_moe_tensor_parallel_rank": lambda: 0,
        "*.get_moe_expert_parallel_rank": lambda: 0,
        "torch.get_default_dtype": lambda: "bfloat16",
        **{f"*.{name}": Linear for name in LINEARS},
        "sglang.srt.eplb.expert_location_dispatch.ExpertLocationDispatchInfo.init_new": _none,
        "*.is_prefill_context_parallel_enabled": _no,
        "*.get_attn_context_model_parallel_world_size": lambda: 1,
        "*.get_moe_data_parallel_world_size": lambda: 1,
        "*.is_dsa_enable_prefill_cp": _no,
        "torch.cuda.is_initialized": lambda: True,
        "*.get_attention_tp_size": lambda: 1,
        "*.get_attention_tp_rank": lambda: 0,
        "*.direct_register_custom_op": _none,
        "=direct_register_custom_op": _none,
        "*.has_forward_context": _no,
        "*.is_dp_attention_enabled": _no,
        "torch.distributed.is_initialized": _no,
        "*.create_kt_config_from_server_args": _none,
        "*.is_allocation_symmetric": _no,
        "*.transform_select_experts_inputs": _inputs,
        "=set_weight_attrs": _none,
        "*.set_weight_attrs": _none,
        "*.is_nsa_enable_prefill_cp": _no,
        "*.get_pp_group": lambda: types.SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1),
        "*.ENABLE_JIT_DEEPGEMM": capability[0] in {9, 10},
        "sglang.srt.layers.deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0": capability[0] == 10,
    }
