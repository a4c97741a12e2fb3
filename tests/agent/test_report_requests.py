"""What METRICS can carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flare.agent.ranks import MAX_REASONS, MAX_REPORTS
from flare.agent.report_requests import MAX_DOCUMENTS, with_documents
from flare.agent.sampler import MAX_DOCUMENT
from flare.strict_json import canonical
from flare.wire.messages import GroupReport, MetricsReply


def report(number: int, state: str = "exited") -> GroupReport:
    return GroupReport(
        launch=f"glm-{number}",
        name="glm",
        core="core.safetensors",
        rank=0,
        ranks=1,
        gpus=(),
        pid=None,
        state=state,
        phase=None,
        status=None,
        signal=None,
        uptime=1.0,
        url=None,
        reason=None,
    )


def test_documents_have_a_budget_that_the_newest_and_what_runs_come_first_in() -> None:
    document = {"text": "x" * (MAX_DOCUMENT - 100)}
    reports = tuple(report(number, "running" if number in (0, 5) else "failed") for number in range(100))
    documents: dict[str, tuple[Mapping[str, Any], float]] = {each.launch: (document, 1.5) for each in reports}
    del documents["glm-98"]
    groups = with_documents(reports, documents.get)
    assert [group.report for group in groups] == list(reports)
    told = [number for number, group in enumerate(groups) if group.document is not None]
    fit = MAX_DOCUMENTS // len(canonical(document))
    assert told == [0, 5, *range(101 - fit, 98), 99]
    assert {group.document_age for group in groups} == {1.5, None}
    assert len(MetricsReply(gpus=(), groups=groups).to_body()) <= MAX_DOCUMENTS + MAX_REPORTS


def test_a_small_document_goes_with_what_is_left() -> None:
    documents: dict[str, tuple[Mapping[str, Any], float]] = {
        f"glm-{number}": ({"text": "x" * (MAX_DOCUMENTS if number else 10)}, 0.0) for number in range(2)
    }
    groups = with_documents((report(0), report(1)), documents.get)
    assert [group.document is not None for group in groups] == [True, False]


def test_everything_that_metrics_tells_fits() -> None:
    rest = 256 * 1024  # devices, and two members more a run
    assert MAX_REPORTS + MAX_REASONS + MAX_DOCUMENTS + rest <= MetricsReply.LIMIT
