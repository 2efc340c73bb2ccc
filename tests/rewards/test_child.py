"""The reward child through its messages."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex.checkpoint.fingerprint import file_fingerprint
from rollplex.errors import ConfigError, DataError, ModelError, ProtocolError, RewardError, StateError
from rollplex.protocol.common import Failed, Responses
from rollplex.protocol.inputs import DataSource
from rollplex.protocol.reward import (
    OpenRewards,
    RewardFunction,
    RewardGroup,
)
from rollplex.rewards.child import RewardService, names_of
from support.reward_child import TEXTS, Child, numbers, processes_with, wait_until

Functions = Callable[[str], Path]


def test_rewards_are_the_weighted_sum_and_each_functions_values_are_kept(child: Child, functions: Functions) -> None:
    path = functions(
        "def right(completions, answer, **kwargs):\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [1.0 if a == '7' and t == 'seven' else 0 for t, a in zip(texts, answer)]\n"
        "def length(completion_ids):\n"
        "    return [len(ids) if len(ids) > 1 else None for ids in completion_ids]\n"
        "def seen(**kwargs):\n"
        "    assert {*kwargs} == {'answer', 'completion_ids', 'completion_lengths', 'completions', 'finish_reasons',\n"
        "        'images', 'level', 'log_metric', 'prompts', 'step', 'trainer_state'}, kwargs\n"
        "    assert kwargs['level'] == [{'n': [1]}] * 3 and kwargs['images'] == [['a.png']] * 3\n"
        "    return [None, None, 9]\n"
    )
    opened = child.open((f"{path}:right", 2.0), (f"{path}:length", 0.5), (f"{path}:seen", 0.0))
    assert opened.names == ("right", "length", "seen")
    assert opened.fingerprints == (file_fingerprint(path),) * 3
    before = time.monotonic()
    answer = child.rewarded()
    assert (answer.cause, answer.step, answer.group) == (2, 3, 5)
    assert answer.texts == TEXTS
    assert before <= answer.start_s <= answer.end_s <= time.monotonic()
    lengths = [len(ids) for ids in ([1, 1], [1, 1], [1])]
    right, length, seen = (numbers(blob) for blob in answer.by_function)
    assert right == [1.0, 0.0, 0.0]
    assert length[0] >= lengths[0]
    assert math.isnan(length[2])
    assert math.isnan(seen[0])
    assert seen[2] == 9.0
    rewards = numbers(answer.rewards)
    assert rewards == [2.0 + 0.5 * length[0], 0.5 * length[1], 0.0]


def test_a_sample_for_which_all_abstain_is_not_a_number_and_no_failure(child: Child, functions: Functions) -> None:
    child.open((f"{functions('def f(prompts): return [None, 1, None]')}:f", 3.0))
    first, second, third = numbers(child.rewarded().rewards)
    assert second == 3.0
    assert math.isnan(first)
    assert math.isnan(third)


def test_a_plain_prompt_gives_plain_completions(child: Child, functions: Functions) -> None:
    path = functions(
        "def f(prompts, completions):\n"
        "    return [float(p == '2 + 2 = ' and c == '4') for p, c in zip(prompts, completions)]\n"
    )
    child.open((f"{path}:f", 1.0))
    assert numbers(child.rewarded(1, ["4", "5"]).rewards) == [1.0, 0.0]


def test_an_async_function_is_awaited(child: Child, functions: Functions) -> None:
    code = "import asyncio\nasync def f(prompts):\n    await asyncio.sleep(0)\n    return [1] * len(prompts)\n"
    child.open((f"{functions(code)}:f", 1.0))
    assert numbers(child.rewarded().rewards) == [1.0] * 3


def test_a_function_that_reads_its_input_gets_nothing(child: Child, functions: Functions) -> None:
    child.open((f"{functions('import sys' + chr(10) + 'def f(prompts): return [len(sys.stdin.read())] * 3')}:f", 1.0))
    assert numbers(child.rewarded().rewards) == [0.0] * 3


def test_functions_see_neither_secrets_nor_files_of_the_run(
    child: Child, functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLPLEX_SECRET", "s")
    path = functions(
        "import os, sys\n"
        "def f(prompts):\n"
        "    assert 'ROLLPLEX_SECRET' not in os.environ and os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
        "    assert 'numpy' not in sys.modules and 'torch' not in sys.modules\n"
        "    fds = [fd for fd in os.listdir('/proc/self/fd') if int(fd) > 2]\n"
        "    return [float(len(fds))] * 3\n"
    )
    child.open((f"{path}:f", 1.0))
    assert numbers(child.rewarded().rewards) == [3.0] * 3  # its channel, the file for stacks, and the listing itself


def test_a_function_may_change_its_arguments_without_harm_to_the_next(child: Child, functions: Functions) -> None:
    path = functions(
        "def f(completions, level):\n"
        "    completions.clear()\n"
        "    level[0]['n'].append(2)\n"
        "    return [1.0] * 3\n"
        "def g(completions, level): return [float(len(completions) + len(level[0]['n']))] * 3\n"
    )
    child.open((f"{path}:f", 0.0), (f"{path}:g", 1.0))
    assert numbers(child.rewarded().rewards) == [4.0] * 3


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def g(): pass", "no such function"),
        ("import nothing_here", "fails to import"),
        ("def f(prompts, /): pass", "by position only"),
        ("def f(text, label): pass", "fit no signature"),
        ("import os\nos._exit(3)", "ended while it imported them; got ended with exit code 3"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_at_once(
    code: str, says: str, child: Child, functions: Functions
) -> None:
    with pytest.raises(RewardError, match=says):
        child.open((f"{functions(code)}:f", 1.0))
    assert processes_with("rollplex.rewards.runner", os.getpid()) == []


def test_an_import_that_never_ends_is_cut_off(functions: Functions) -> None:
    from rollplex.rewards.process import FunctionProcess
    from rollplex.rewards.wire import Function

    path = functions("import time\ntime.sleep(600)\n")
    with pytest.raises(RewardError, match=r"(?s)does not end; got .*line 2") as caught:
        FunctionProcess([Function(spec=f"{path}:f")], 0, lambda _: None).start(limit_s=1.0)
    assert str(path) in caught.value.where


def test_a_module_beside_the_run_cannot_hide_one_of_ours(
    child: Child, functions: Functions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("json", "msgspec", "rollplex"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('executed')\n")
    (tmp_path / "mine.py").write_text("def f(prompts): return [1] * len(prompts)\n")
    child.open(("mine:f", 1.0))
    assert numbers(child.rewarded().rewards) == [1.0] * 3


def test_functions_without_weight_are_refused(child: Child) -> None:
    with pytest.raises(ConfigError, match="has a weight"):
        child.open(("json:dumps", 0.0))


def test_options_that_are_no_object_are_refused(child: Child) -> None:
    with pytest.raises(ProtocolError, match="no JSON object"):
        child.open(RewardFunction(spec="json:dumps", weight=1.0, options="[]"))


def test_instructions_out_of_order_and_wrong_sizes_are_refused(child: Child, functions: Functions) -> None:
    with pytest.raises(StateError):
        child.ask(child.group())
    child.open((f"{functions('def f(prompts): return [1] * len(prompts)')}:f", 1.0))
    with pytest.raises(DataError, match="no such row"):
        child.ask(child.group(row=3))
    for responses in (
        Responses(group=0, lengths=(2,), tokens=b"1234"),
        Responses(group=0, lengths=(), tokens=b""),
        Responses(group=0, lengths=(1, 1), tokens=b"12345678"),
    ):
        with pytest.raises(ProtocolError):
            child.ask(RewardGroup(cause=1, step=0, source="train", row=0, responses=responses, stopped=(True,)))


def test_a_model_without_tokenizer_is_refused(tmp_path: Path, source: DataSource) -> None:
    message = OpenRewards(
        cause=1,
        model_path=str(tmp_path),
        sources=(source,),
        functions=(RewardFunction(spec="json:dumps", weight=1.0),),
        time_limit_s=1.0,
        memory_limit_bytes=0,
    )
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        RewardService().handle(message, lambda _: pytest.fail("answered"))


def test_a_long_completion_is_cut_for_the_report_and_not_for_the_function(child: Child, functions: Functions) -> None:
    child.open((f"{functions('def f(completions): return [len(completions[0][0][' + repr('content') + '])]')}:f", 1.0))
    answer = child.rewarded(0, ["x" * 70_000])
    assert numbers(answer.rewards) == [70_000.0]
    assert len(answer.texts[0]) == 65_536


def test_names_are_all_different() -> None:
    assert names_of(["a:f", "b.py:f", "c:g", "d:f"]) == ("f", "f#2", "g", "f#3")


def test_the_process_of_the_functions_ends_with_the_child(tmp_path: Path, functions: Functions) -> None:
    path = functions("import time\ndef f(prompts): time.sleep(600)\n")
    code = (
        "import os, sys, threading, time\n"
        "from rollplex.rewards.process import FunctionProcess\n"
        "from rollplex.rewards.wire import Function, Score\n"
        f"p = FunctionProcess([Function(spec={str(path) + ':f'!r})], 0, lambda _: None)\n"
        "p.start()\n"
        "threading.Timer(0.3, lambda: os.kill(os.getpid(), 9)).start()\n"
        "print(p._process.pid, flush=True)\n"
        "p.score(Score(row=b'{\"prompt\": \"a\"}', texts=('a',), lengths=(0,), tokens=b'', stopped=(True,)), 60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9
    pid = int(done.stdout)
    wait_until(lambda: pid not in processes_with("rollplex.rewards.runner"))


def test_functions_that_can_never_be_called_again_end_the_child_s_service_with_their_error(
    child: Child, functions: Functions
) -> None:
    path = functions("import os\ndef f(prompts): os._exit(1)\n")
    child.open((f"{path}:f", 1.0))
    assert child.failed().detail.endswith("ended with exit code 1")
    path.unlink()
    answer = child.ask(child.group())
    assert isinstance(answer, Failed)
    assert (answer.cause, answer.error.kind, answer.error.what) == (2, "RewardError", "There is no such file")


def test_the_columns_that_each_function_requires_are_told(child: Child, functions: Functions) -> None:
    path = functions("def f(completions, **_): pass\ndef g(completions, answer, level=1): pass\n")
    opened = child.open((f"{path}:f", 1.0), (f"{path}:g", 1.0))
    assert [item.names for item in opened.required] == [(), ("answer",)]
