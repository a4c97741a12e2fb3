"""What the front counts itself, joined with what the engine tells: the metrics document and its text form."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Final

from flare.rank.engines.base import EngineMetrics
from flare.values import dataclass

PROMETHEUS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class RequestCounts:
    """Requests at the front."""

    active: int = 0
    queued: int = 0
    completed_total: int = 0
    failed_total: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """What does not change while a rank serves.

    Args:
        model: the served name.
        kv_capacity: tokens of all requests together; None before it is agreed.
        decode_weight_bytes: what the core declares.
    """

    model: str
    kv_capacity: int | None = None
    decode_weight_bytes: int | None = None


@dataclass(slots=True)
class MetricsDocument:
    """Builds the document of serving.md.

    Args:
        serving: the constants.
        state: returns the phase.
        uptime: returns seconds since the rank began.
        wall_clock: Unix seconds.
    """

    serving: Serving
    state: Callable[[], str]
    uptime: Callable[[], float]
    wall_clock: Callable[[], float] = time.time
    requests: RequestCounts = field(default_factory=RequestCounts)

    def build(self, engine: EngineMetrics) -> dict[str, Any]:
        """Return the document; null means that this engine does not tell."""
        return {
            "time": self.wall_clock(),
            "state": self.state(),
            "model": self.serving.model,
            "uptime": round(self.uptime(), 3),
            "prompt_tokens_total": engine.prompt_tokens_total,
            "generated_tokens_total": engine.generated_tokens_total,
            "verification_steps_total": engine.verification_steps_total,
            "drafted_tokens_total": engine.drafted_tokens_total,
            "accepted_tokens_total": engine.accepted_tokens_total,
            "requests": {
                "active": self.requests.active,
                "queued": self.requests.queued,
                "completed_total": self.requests.completed_total,
                "failed_total": self.requests.failed_total,
            },
            "kv_tokens": {"used": engine.kv_used, "capacity": self.serving.kv_capacity},
            "decode_weight_bytes": self.serving.decode_weight_bytes,
        }


_SERIES: Final = (
    # (document's path, series, type, help)
    (("uptime",), "flare_uptime_seconds", "gauge", "Seconds since the rank began."),
    (("prompt_tokens_total",), "flare_prompt_tokens_total", "counter", "Prompt tokens processed."),
    (("generated_tokens_total",), "flare_generated_tokens_total", "counter", "Tokens generated."),
    (("verification_steps_total",), "flare_verification_steps_total", "counter", "Decoding steps."),
    (("drafted_tokens_total",), "flare_drafted_tokens_total", "counter", "Tokens drafted."),
    (("accepted_tokens_total",), "flare_accepted_tokens_total", "counter", "Drafted tokens accepted."),
    (("requests", "active"), "flare_requests_active", "gauge", "Requests that run now."),
    (("requests", "queued"), "flare_requests_queued", "gauge", "Requests that wait."),
    (("requests", "completed_total"), "flare_requests_completed_total", "counter", "Requests answered."),
    (("requests", "failed_total"), "flare_requests_failed_total", "counter", "Requests that failed."),
    (("kv_tokens", "used"), "flare_kv_tokens_used", "gauge", "Tokens in the key-value cache."),
    (("kv_tokens", "capacity"), "flare_kv_tokens_capacity", "gauge", "Tokens that it can hold."),
    (("decode_weight_bytes",), "flare_decode_weight_bytes", "gauge", "Weight bytes read for one token."),
)


def prometheus(document: Mapping[str, Any]) -> str:
    """Return the document as Prometheus text; what is null is left out."""
    model = str(document["model"]).replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    lines = []
    for path, name, kind, text in _SERIES:
        value: Any = document
        for key in path:
            value = value[key]
        if value is not None:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f'{name}{{model="{model}"}} {value}']
    lines += [
        "# HELP flare_up 1 while the group serves.",
        "# TYPE flare_up gauge",
        f'flare_up{{model="{model}"}} {int(document["state"] == "serving")}',
    ]
    return "\n".join(lines) + "\n"
