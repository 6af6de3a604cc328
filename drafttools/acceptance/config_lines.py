"""What a server log says of its own configuration: k, method, rejection sampling, sampling parameters.

Lines used, as vLLM 0.33.0 writes them: `non-default args: {...'speculative_config': {...}}`
(entrypoints/common/startup.py), `Initializing a V1 LLM engine (v...) with config: ... speculative_config=
SpeculativeConfig(...)` (config/vllm.py), and the `SamplingParams(...)` of each request where requests are logged.
"""

from __future__ import annotations

import re
from typing import Any

_QUOTE = rb"(?:\\?['\"])?"
_VALUE = rb"\s*[:=]\s*" + _QUOTE
_SPECULATIVE = re.compile(rb"speculative[_-]config[^{(\r\n]{0,20}([{(])([^})\r\n]*)")
_NAMES = {
    "method": re.compile(rb"\bmethod" + _QUOTE + _VALUE + rb"(\w+)"),
    "draft_model": re.compile(rb"\bmodel" + _QUOTE + _VALUE + rb"([^'\"\\,]+)"),
    "rejection_sample_method": re.compile(rb"\brejection_sample_method" + _QUOTE + _VALUE + rb"(\w+)"),
    "draft_sample_method": re.compile(rb"\bdraft_sample_method" + _QUOTE + _VALUE + rb"(\w+)"),
}
_K = re.compile(rb"\bnum_spec(?:ulative)?_tokens" + _QUOTE + _VALUE + rb"(\d{1,4})\b")
_SYNTHETIC = re.compile(rb"\bsynthetic_acceptance_\w+" + _QUOTE + _VALUE + rb"(\[[^\]]*\]?|[\d.]+)")
_OVERRIDE = re.compile(rb"override_generation_config" + _QUOTE + _VALUE + rb"(\{[^}]*\})")
_VERSION = re.compile(rb"LLM engine \(v([^)]{1,40})\)")
_SAMPLING = re.compile(rb"SamplingParams\(([^)\r\n]{0,400})")
_SAMPLING_FIELD = re.compile(rb"\b(temperature|top_p|top_k|min_p)=([^,)]+)")
MAX_SAMPLINGS = 16


def read_config_line(line: bytes) -> dict[str, Any]:
    """Settings found in one log line; empty when it has none.

    Keys: ``k``, the names of `_NAMES`, ``synthetic_acceptance``, ``override_generation_config``, ``vllm_version``,
    ``sampling`` (one string a line).
    """
    found: dict[str, Any] = {}
    for opening, body in _SPECULATIVE.findall(line):
        found.update(_speculative(opening, body))
    for key, pattern in (("override_generation_config", _OVERRIDE), ("vllm_version", _VERSION)):
        if match := pattern.search(line):
            found[key] = match[1].decode("utf-8", "replace")
    if match := _SAMPLING.search(line):
        fields = _SAMPLING_FIELD.findall(match[1])
        found["sampling"] = ", ".join(f"{name.decode()}={value.decode('utf-8', 'replace')}" for name, value in fields)
    return found


def _speculative(opening: bytes, body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if match := _K.search(body):
        found["k"] = int(match[1])
    for name, pattern in _NAMES.items():
        match = pattern.search(body)
        if match and match[1] != b"None":
            found[name] = match[1].decode("utf-8", "replace")
    if match := _SYNTHETIC.search(body):
        found["synthetic_acceptance"] = match[1].decode("utf-8", "replace")
    # The dictionary form holds all that was set, so what is absent has its default; the repr form leaves things out.
    if opening == b"{" and found:
        found.setdefault("rejection_sample_method", "standard")
        found.setdefault("draft_sample_method", "greedy")
    return found


def merge_config(config: dict[str, Any], found: dict[str, Any]) -> bool:
    """Merge one line's settings into a run's; True when a setting changed within the run."""
    changed = False
    sampling = found.pop("sampling", None)
    if sampling:
        samplings = config.setdefault("sampling", [])
        if sampling not in samplings and len(samplings) < MAX_SAMPLINGS:
            samplings.append(sampling)
            samplings.sort()
    for key, value in found.items():
        changed |= config.get(key, value) != value
        config[key] = value
    return changed
