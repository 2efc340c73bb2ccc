"""The modules that only compute, run by node where there is one: a live timeline equals the one that history shows."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollplex.journal.reader import Reader
from rollplex_coordinator.archive.timeline import read_timeline
from rollplex_coordinator.http.pages import FOLDER
from rollplex_coordinator.http.streams import frame
from support.past_runs import write_run

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, which runs the dashboard's modules")


def in_node(script: str, **given: Any) -> Any:
    """What a module's script puts on standard output, as JSON. `given` is there under its names."""
    head = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in given.items())
    done = subprocess.run(
        [str(NODE), "--input-type=module", "--eval", head + script],
        cwd=FOLDER / "js",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def story_of(folder: Path, count: int) -> Any:
    """The live timeline of the last iterations, from the same frames that the stream sends."""
    with Reader(folder / "journal.sqlite") as reader:
        frames = [frame(row).decode() for row in reader.rows_after(0, 10_000)]
    events = [json.loads(text.split("data: ", 1)[1]) for text in frames]
    flat = [
        {**one["event"], "id": one["id"], "wall_s": one["wall_s"], "monotonic_s": one["monotonic_s"]} for one in events
    ]
    script = """
    const { Story } = await import("./story.js");
    const story = new Story();
    for (const event of events) story.tell(event);
    console.log(JSON.stringify({ timeline: story.timeline(count, story.clock_s), phase: story.phase, rows: story.rows,
      alarm: story.alarm, ended: story.ended }));
    """
    return in_node(script, events=flat, count=count)


def boxes(timeline: Any, zero: float) -> dict[str, list[tuple[str, float, float]]]:
    return {
        lane["name"]: sorted(
            (span["kind"], round(span["start_s"] - zero, 3), round(span["end_s"] - zero, 3))
            for span in lane["spans"]
            if span["end_s"] is not None and span["kind"] != "group_finished"
        )
        for lane in timeline["lanes"]
        if lane["name"] != "update"
    }


def test_the_live_timeline_equals_the_one_of_history(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=4)
    live = story_of(folder, 2)["timeline"]
    past = msgspec.to_builtins(read_timeline(folder, None, 2))
    assert live["steps"] == past["steps"] == [2, 3]
    zeros = [next(span["start_s"] for span in one["phases"] if span["name"] == "ROLLOUT") for one in (live, past)]
    found = boxes(live, zeros[0])
    assert found == boxes(past, zeros[1])
    assert {name for name, spans in found.items() if spans} == {
        "rollout[0:0]",
        "prefix[0:0]",
        "trainer[0:0]",
        "rewards",
    }


def test_events_become_phase_numbers_and_end(tmp_path: Path) -> None:
    story = story_of(write_run(tmp_path / "a", steps=3), 1)
    assert story["phase"] == "IDLE"
    assert [row["step"] for row in story["rows"]] == [0, 1, 2]
    assert story["ended"] == {"exit_code": 0, "reason": "done"}
    assert story["alarm"] is None


def test_a_page_that_stays_open_keeps_a_bounded_number_of_rows() -> None:
    script = """
    const { Story } = await import("./story.js");
    const story = new Story(["reward"]);
    for (let step = 0; step < 30000; step++) story.onIterationDone({ step, metrics: { reward: step, other: 1 } });
    const steps = story.rows.map((row) => row.step);
    console.log(JSON.stringify({ count: steps.length, last: story.rows.at(-1), first: steps[0],
      rising: steps.every((step, at) => at === 0 || step > steps[at - 1]), newest: steps.slice(-500) }));
    """
    found = in_node(script)
    assert 3_000 <= found["count"] <= 6_000
    assert found["last"] == {"step": 29_999, "metrics": {"reward": 29_999}}
    assert (found["first"], found["rising"]) == (0, True)
    assert found["newest"] == list(range(29_500, 30_000))


def test_memory_by_kind_adds_up_per_device() -> None:
    leases = [
        {"device": "0:0", "kind": "workspace", "size_bytes": 5, "held_bytes": 4},
        {"device": "0:0", "kind": "actor_weights", "size_bytes": 7, "held_bytes": None},
        {"device": "0:0", "kind": "workspace", "size_bytes": 1, "held_bytes": 1},
        {"device": "0:1", "kind": "workspace", "size_bytes": 100, "held_bytes": 1},
    ]
    script = """
    globalThis.document = {};
    const { byKind } = await import("./memory.js");
    console.log(JSON.stringify(byKind({ leases }, "0:0")));
    """
    assert in_node(script, leases=leases) == [
        {"kind": "actor_weights", "leases": 1, "size": 7, "held": 0, "measured": False},
        {"kind": "workspace", "leases": 2, "size": 6, "held": 5, "measured": True},
    ]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("bytes(0)", "0 B"),
        ("bytes(1536)", "1.50 KiB"),
        ("bytes(null)", "–"),
        ("number(0.000000151)", "1.5e-7"),
        ("number(null)", "–"),
        ("number(0.91875)", "0.9187"),
        ("seconds(0.0034)", "3.4 ms"),
        ("seconds(0.25)", "0.25 s"),
        ("seconds(7200)", "2.0 h"),
    ],
)
def test_numbers_are_written_for_people(call: str, text: str) -> None:
    script = f'const {{ bytes, number, seconds }} = await import("./format.js"); console.log(JSON.stringify({call}));'
    assert in_node(script) == text


def test_a_newcomer_that_died_is_no_alarm_once_the_old_program_has_its_place_again() -> None:
    died = {"service": "rollout[0:0]", "role": "rollout", "incarnation": 2, "pid": 7, "how": "exit code 7"}
    script = """
    const { Story } = await import("./story.js");
    const story = new Story();
    story.onServiceDied(died);
    const before = story.alarm.what;
    story.onSwapRefused({ role: "prefix" });
    const other = story.alarm.what;
    story.onSwapRefused({ role: "rollout" });
    const after = story.alarm;
    story.onErrorRaised({ error: { kind: "RewardError", what: "w" }, service: "reward" });
    const how = story.alarm.how ?? null;
    story.onServiceDied(died);
    story.reset();
    console.log(JSON.stringify({ before, other, after, how, died: story.died }));
    """
    text = "rollout[0:0] died: exit code 7"
    assert in_node(script, died=died) == {"before": text, "other": text, "after": None, "how": None, "died": None}


def test_pictures_that_a_page_holds_are_bounded_and_each_is_fetched_once() -> None:
    script = """
    let held = 0, fetched = 0;
    globalThis.fetch = async () => { fetched += 1; return { ok: true, blob: async () => new Blob(["x"]) }; };
    const [make, end] = [URL.createObjectURL, URL.revokeObjectURL];
    URL.createObjectURL = (blob) => { held += 1; return make(blob); };
    URL.revokeObjectURL = (address) => { held -= 1; return end(address); };
    const { picture, forget } = await import("./api.js");
    const [one, two] = await Promise.all([picture("0"), picture("0")]);
    for (let at = 0; at < 400; at++) await picture(String(at));
    const most = held;
    forget();
    console.log(JSON.stringify({ same: one === two, most, fetched, held }));
    """
    assert in_node(script) == {"same": True, "most": 300, "fetched": 401, "held": 0}


def test_a_worker_that_died_is_no_alarm_once_all_are_back_and_a_step_that_begins_again_is_there_once() -> None:
    died = {"service": "rollout[0:0]", "role": "rollout", "incarnation": 1, "pid": 7, "how": "killed by SIGKILL"}
    script = """
    const { Story } = await import("./story.js");
    const story = new Story();
    story.onIterationStarted({ step: 3, monotonic_s: 1 });
    story.onIterationStarted({ step: 4, monotonic_s: 2 });
    story.onServiceDied(died);
    const before = story.alarm.what;
    story.onWorkersRestarted({});
    story.onIterationStarted({ step: 4, monotonic_s: 9 });
    console.log(JSON.stringify({ before, after: story.alarm, died: story.died, starts: story.starts }));
    """
    assert in_node(script, died=died) == {
        "before": "rollout[0:0] died: killed by SIGKILL",
        "after": None,
        "died": None,
        "starts": [{"step": 3, "at_s": 1}, {"step": 4, "at_s": 9}],
    }
