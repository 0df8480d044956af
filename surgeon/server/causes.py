"""Reads why a server did not come up, or went down, from what it logged.

One table: a pattern, what it means, what to do. The first entry that matches is told, so what explains comes before
what merely follows from it: a rank that dies takes NCCL, the watchdog and the launcher down with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Cause:
    """Something that is known to go wrong.

    Attributes:
        name: a stable word for it.
        pattern: finds it in a log.
        meaning: what it means.
        advice: what to do about it.
    """

    name: str
    pattern: re.Pattern[str]
    meaning: str
    advice: str


@dataclass(frozen=True)
class Diagnosis:
    """A cause that was found.

    Attributes:
        cause: which.
        line: the line of the log that says so.
    """

    cause: Cause
    line: str

    @property
    def text(self) -> str:
        """Meaning and evidence in one line."""
        return f"{self.cause.meaning} ({self.line})"


def _cause(name: str, pattern: str, meaning: str, advice: str) -> Cause:
    return Cause(name, re.compile(pattern, re.MULTILINE), meaning, advice)


CAUSES: Final[tuple[Cause, ...]] = (
    _cause(
        "patched-file-syntax",
        r'layers/moe/(?:topk|_surgeon_\w+)\.py", line \d+[\s\S]{0,800}?^(?:\w+: )?'
        r"(?P<line>(?:SyntaxError|IndentationError|TabError)\b.*)",
        "the patched file does not compile",
        "roll back; if the file was also edited by hand, compare it with `surgeon diff`",
    ),
    _cause(
        "patch-import",
        r"^(?P<line>.*(?:ImportError|ModuleNotFoundError|AttributeError)\b.*_surgeon_\w+.*)",
        "the patch's runtime cannot be imported beside topk.py",
        "apply again: the file beside topk.py is missing or from another version",
    ),
    _cause(
        "patch-raised",
        r'^(?P<line>\s*File "[^"\n]*/_surgeon_\w+\.py", line \d+.*)',
        "an exception passed through the patch's runtime",
        "roll back, and report the traceback with the release of sglang",
    ),
    _cause(
        "model-type",
        r"^(?P<line>.*(?:does not recognize this architecture|[Uu]nrecognized model|"
        r"KeyError: '(?:\w*_)?(?:moe|dsa|glm\w*|deepseek\w*|qwen\w*|kimi\w*|llama\w*|gpt\w*)\w*').*)",
        "the installed transformers does not know this model's type",
        "install the transformers that the model needs (a later install of sglang may have put its own pin back): "
        "`surgeon verify-env`",
    ),
    _cause(
        "undefined-symbol",
        r"^(?P<line>.*undefined symbol: .*)",
        "a compiled module was built for another torch than the one that is installed",
        "install the kernel package (sgl-kernel, flashinfer) that was built for this torch: `surgeon verify-env`",
    ),
    _cause(
        "shared-memory",
        r"^(?P<line>.*(?:out of resource: shared memory|shared memory.*(?:exceeds|over).*limit|"
        r"Required: \d+, Hardware limit: \d+).*)",
        "a kernel's tile needs more shared memory than this GPU has (101376 bytes on SM120)",
        "the tuned MoE configuration for this shape and GPU is missing: add its JSON, or choose another MoE backend",
    ),
    _cause(
        "deep-gemm",
        r"^(?P<line>.*AttributeError.*get_num_sms.*)",
        "DeepGEMM was chosen, which has no kernels for this GPU (SM120)",
        "set SGLANG_ENABLE_JIT_DEEPGEMM=0 and SGLANG_ENABLE_DEEP_GEMM=0",
    ),
    _cause(
        "attention-architecture",
        r"^(?P<line>.*(?:Unsupported architecture.*attention|attention\.hpp.*Unsupported).*)",
        "the attention backend does not support this GPU",
        "use --attention-backend flashinfer",
    ),
    _cause(
        "kernel-architecture",
        r"^(?P<line>.*no kernel image is available for execution on the device.*)",
        "a compiled module holds no code for this GPU's generation",
        "install a build for this GPU; check that torch and the kernel packages are of one CUDA flavour",
    ),
    _cause(
        "moe-backend",
        r"^(?P<line>.*(?:NotImplementedError|ValueError|AssertionError).*[Uu]se --moe-runner-backend.*|"
        r".*[Uu]se --moe-runner-backend \w+ (?:instead|for this router).*)",
        "the chosen MoE backend does not do this checkpoint on this release",
        "use the backend that the line names, and check quality after any change of backend",
    ),
    _cause(
        "nan",
        r"^(?P<line>.*probability tensor contains either .?inf.*)",
        "the model computed NaN or infinity",
        "with FP4 and MTP on SM120 this is a race in an older FlashInfer: update it and remove its old JIT cache; "
        "if the unpatched server does not do it, roll back",
    ),
    _cause(
        "out-of-memory",
        r"^(?P<line>.*(?:OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|Not enough memory\. Please try|"
        r"can't allocate memory|Cannot allocate memory|MemoryError).*)",
        "memory ran out",
        "wait until the old processes have let go of the GPU; else lower --mem-fraction-static or "
        "--cuda-graph-max-bs; with NEXTN, SGLANG_ENABLE_SPEC_V2=True keeps the model from being loaded twice",
    ),
    _cause(
        "port-in-use",
        r"^(?P<line>.*(?:\[Errno 98\]|EADDRINUSE|[Aa]ddress already in use).*)",
        "another process holds a port that the server needs",
        "find it with `ss -ltnp`; ports for NCCL and the tokenizer count too",
    ),
    _cause(
        "missing-weights",
        r"^(?P<line>.*(?:layers\.\d+\.\S+.*(?:not found|missing)|KeyError: 'model\.layers\.\d+\.).*)",
        "the checkpoint lacks weights that were asked for",
        "if it is the layer after the last, this checkpoint has no MTP layer: drop --speculative-algorithm",
    ),
    _cause(
        "weight-shape",
        r"^(?P<line>.*(?:size mismatch for|loaded_weight\.shape|"
        r"[Tt]he size of tensor a \(\d+\) must match the size of tensor b).*)",
        "the checkpoint's weights do not have the shape that the model code expects",
        "with FP4 experts beside a bf16 shared expert, add --disable-shared-experts-fusion",
    ),
    _cause(
        "no-gpu",
        r"^(?P<line>.*(?:No CUDA GPUs are available|CUDA driver version is insufficient|libcuda\.so\.1: cannot open|"
        r"Found no NVIDIA driver).*)",
        "the driver or the GPUs cannot be seen",
        "run nvidia-smi on the node; check CUDA_VISIBLE_DEVICES and the container's devices",
    ),
    _cause(
        "shared-library",
        r"^(?P<line>.*(?:cannot open shared object file|version `GLIBC\w*_[\d.]+' not found).*)",
        "a shared library is missing or too old",
        "start it with the LD_LIBRARY_PATH that it had; reinstall the package that the line names",
    ),
    _cause(
        "arguments",
        r"^(?P<line>.*error: (?:unrecognized arguments|argument --|the following arguments are required|"
        r"ambiguous option).*)",
        "this release does not know one of the server's arguments",
        "flags change between releases: look at `python -m sglang.launch_server --help` on the node",
    ),
    _cause(
        "model-not-found",
        r"^(?P<line>.*(?:is not a local folder and is not a valid model identifier|Repository Not Found|"
        r"Can't load the configuration of|LocalEntryNotFoundError|Incorrect path_or_model_id).*)",
        "the model is not where it was asked for",
        "check the path, HF_HOME and the network of the node",
    ),
    _cause(
        "disk-full",
        r"^(?P<line>.*No space left on device.*)",
        "a disk is full",
        "free space on the disk that holds the log, the JIT caches or /dev/shm",
    ),
    _cause(
        "import",
        r"^(?P<line>.*(?:ModuleNotFoundError|ImportError)\b.*)",
        "a Python module that the server needs cannot be imported",
        "`surgeon verify-env` shows what drifted in the server's environment",
    ),
    _cause(
        "not-implemented",
        r"^(?P<line>.*NotImplementedError\b.*)",
        "the release does not implement this combination of model, GPU and options",
        "compare the launch line with one that is known to work for this model and GPU",
    ),
    _cause(
        "device-assert",
        r"^(?P<line>.*(?:device-side assert triggered|an illegal memory access was encountered).*)",
        "a kernel read or wrote out of bounds",
        "if the unpatched server does not do it, roll back; the stack shows where it was noticed, not where it is",
    ),
    _cause(
        "warm-up",
        r"^(?P<line>.*Initialization failed\. warmup error.*)",
        "the server's own warm-up request failed, and it stopped itself",
        "a *_proxy variable in its environment sends that request astray: unset it, or add 127.0.0.1 to no_proxy",
    ),
    _cause(
        "watchdog",
        r"^(?P<line>.*[Ww]atchdog timeout.*)",
        "a step took longer than the scheduler's watchdog allows, and it killed the server",
        "a first compilation may take that long: raise --watchdog-timeout",
    ),
    _cause(
        "nccl",
        r"^(?P<line>.*(?:NCCL error|ncclUnhandledCudaError|ncclSystemError|ncclInternalError|ncclRemoteError|"
        r"ProcessGroupNCCL.*(?:timed? ?out|[Tt]imeout)|collective operation timeout).*)",
        "the ranks could not talk to each other, or one of them was gone",
        "look for an earlier error of a single rank; else check NCCL_P2P_LEVEL and the PCIe topology",
    ),
    _cause(
        "killed",
        r"^(?P<line>.*(?:scheduler is dead|exit code: -9|exitcode[ =:]+-9|^Killed$).*)",
        "a process was killed from outside, most often because the machine's memory ran out",
        "look at dmesg for the OOM killer",
    ),
    _cause(
        "moe-config",
        r"^(?P<line>.*Config file not found at .*E=\d+,N=\d+.*)",
        "there is no tuned MoE configuration for this shape and GPU",
        "it runs with a default tile, slower, and on SM120 the tile may be too large",
    ),
)

_EXCEPTION: Final = re.compile(
    r"^(?:\[[^\]\n]*\] ?)?(?P<line>(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception)\b.*)", re.MULTILINE
)
_UNKNOWN_ADVICE: Final = "read the log around that line with `surgeon logs`"
_LONGEST_LINE: Final = 300


def diagnose(log: str) -> Diagnosis | None:
    """Find the cause of a failure in a log.

    Args:
        log: what the server logged since it was started.

    Returns:
        The first known cause of the table, on its first line; else the last exception; None for a log without either.
    """
    for cause in CAUSES:
        match = cause.pattern.search(log)
        if match is not None:
            return Diagnosis(cause, _tidy(match["line"]))
    exceptions = list(_EXCEPTION.finditer(log))
    if not exceptions:
        return None
    last = exceptions[-1]
    unknown = Cause("exception", _EXCEPTION, "the server raised an exception", _UNKNOWN_ADVICE)
    return Diagnosis(unknown, _tidy(last["line"]))


def _tidy(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..."
