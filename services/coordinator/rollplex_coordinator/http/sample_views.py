"""A sample as the API shows it: long texts and large groups are cut, and say by how much. Pure."""

from __future__ import annotations

from rollplex_coordinator.archive.samples import Hit
from rollplex_coordinator.http.run_views import PictureView, ResponseView, SampleView
from rollplex_coordinator.records.sample_table import SampleResponse

MAX_CHARS = 4_000
MAX_RESPONSES = 32


def sample_view(hit: Hit) -> SampleView:
    """The view of a group that was found."""
    group = hit.group
    return SampleView(
        step=hit.step,
        version=hit.version,
        group=group.group,
        row=group.row,
        prompt=group.prompt[:MAX_CHARS],
        pictures=tuple(
            PictureView(
                name=item.name,
                width=item.width,
                height=item.height,
                problem=item.problem,
                index=index if item.png else None,
            )
            for index, item in enumerate(group.media)
        ),
        left_out=group.left_out,
        missing=group.missing,
        skipped=group.skipped,
        responses=tuple(_response_view(response) for response in group.responses[:MAX_RESPONSES]),
        more_responses=max(0, len(group.responses) - MAX_RESPONSES),
    )


def _response_view(response: SampleResponse) -> ResponseView:
    return ResponseView(
        sample=response.sample,
        text=response.completion[:MAX_CHARS],
        more_characters=max(0, len(response.completion) - MAX_CHARS),
        reward=response.reward,
        rewards=response.rewards,
        advantage=response.advantage,
        tokens=response.tokens,
        stopped=response.stopped,
    )
