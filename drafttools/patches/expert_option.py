"""Let vLLM's speculative configuration carry `mtp_expert_quantization`."""

from __future__ import annotations

import dataclasses
import hashlib
from types import ModuleType
from typing import Any, Literal

from drafttools.patching import Patch, Seam, Transaction

NAME = "mtp_expert_quantization"
VALUES = (None, "fp8")
OPT_IN = '--speculative-config {"method": "mtp", "mtp_expert_quantization": "fp8"}'


def _field() -> Any:
    """The dataclass field SpeculativeConfig lacks: vLLM's `replace()` and command line go by the fields."""
    kind = Literal["fp8"] | None
    option = dataclasses.make_dataclass("_Option", [(NAME, kind, dataclasses.field(default=None))])
    return dataclasses.fields(option)[0]


def _init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    value = kwargs.pop(NAME, None)
    if value not in VALUES:
        raise ValueError(f'{NAME} in --speculative-config must be null or "fp8", got {value!r}')
    wrapped(*args, **kwargs)
    if value is not None and instance.method != "mtp":
        raise ValueError(f'{NAME} needs "method": "mtp" in --speculative-config, got {instance.method!r}')
    setattr(instance, NAME, value)


def _compute_hash(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> str:
    """vLLM's own hash; for MTP the option joins it, set or not, so no key without it is ever met."""
    own: str = wrapped(*args, **kwargs)
    if instance.method != "mtp":
        return own
    return hashlib.sha256(f"{own} {NAME}={getattr(instance, NAME)}".encode()).hexdigest()


def hazard(vllm_config: Any, _: Any) -> str | None:
    """The option, when it is set: then the patches that honour it must stand."""
    value = getattr(vllm_config.speculative_config, NAME, None)
    return f"{NAME}={value}" if value is not None else None


def _apply(transaction: Transaction, module: ModuleType) -> None:
    cls = module.SpeculativeConfig
    # The class default is what configurations pickled without the option read.
    transaction.replace(cls, NAME, None)
    transaction.replace(cls, "__dataclass_fields__", {**cls.__dataclass_fields__, NAME: _field()})
    transaction.wrap(cls, "__init__", _init)
    transaction.wrap(cls, "compute_hash", _compute_hash)


PATCH = Patch(
    name="expert_option",
    module="vllm.config.speculative",
    seams=(
        Seam("SpeculativeConfig.compute_hash", parameters=("self",), features=("method", "draft_model_config")),
        Seam("SpeculativeConfig.__post_init__", parameters=("self",)),
    ),
    what="`--speculative-config` accepts `mtp_expert_quantization` (null or `fp8`), validated, kept through pickling "
    "and `replace()`, and part of the compile-cache key of MTP drafts.",
    why="vLLM refuses keys it does not know, and a graph compiled for FP16 experts must not serve FP8 ones.",
    upstream="https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/config/speculative.py",
    retire="When vLLM has an option for the precision of MTP experts.",
    apply=_apply,
    opt_in=OPT_IN,
    hazard=hazard,
    native=(NAME,),
    roles=("worker", "engine_core", "api_server"),
)
