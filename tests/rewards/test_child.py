"""The reward child through its messages, with functions that do what they should not."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollplex.errors import ConfigError, DataError, ModelError, ProtocolError, RewardError, StateError
from rollplex.protocol.common import Leave, Responses
from rollplex.protocol.inputs import DataSource
from rollplex.protocol.reward import (
    GroupRewarded,
    OpenRewards,
    RewardFailed,
    RewardFunction,
    RewardGroup,
    RewardProblem,
    RewardsOpened,
    ToReward,
)
from rollplex.rewards.child import RewardService, names_of

TEXTS = ("seven", "8", "")


class Child:
    """A reward service with what it answered and printed."""

    def __init__(self, model_folder: Path, source: DataSource) -> None:
        from rollplex.data.tokenizer import TextTokenizer

        self.printed = bytearray()
        self.service = RewardService(self.printed.extend)
        self._tokenizer = TextTokenizer(model_folder)
        self._folder = model_folder
        self._source = source

    def ask(self, message: ToReward) -> Any:
        answers: list[Any] = []
        self.service.handle(message, answers.append)
        assert len(answers) == 1
        return answers[0]

    def open(self, *functions: tuple[str, float], limit_s: float = 20.0, memory: int = 0) -> RewardsOpened:
        message = OpenRewards(
            cause=1,
            model_path=str(self._folder),
            sources=(self._source,),
            functions=tuple(RewardFunction(spec=spec, weight=weight) for spec, weight in functions),
            time_limit_s=limit_s,
            memory_limit_bytes=memory,
        )
        answer = self.ask(message)
        assert isinstance(answer, RewardsOpened)
        return answer

    def group(self, row: int = 0, texts: Sequence[str] = TEXTS, group: int = 5) -> RewardGroup:
        ids = [[*self._tokenizer.encode(text), self._tokenizer.id_of("<|im_end|>")] for text in texts]
        tokens = b"".join(struct.pack(f"<{len(sample)}i", *sample) for sample in ids)
        responses = Responses(group=group, lengths=tuple(len(sample) for sample in ids), tokens=tokens)
        return RewardGroup(cause=2, step=3, source="train", row=row, responses=responses)

    def rewarded(self, row: int = 0, texts: Sequence[str] = TEXTS) -> GroupRewarded:
        answer = self.ask(self.group(row, texts))
        assert isinstance(answer, GroupRewarded), answer
        return answer

    def failed(self, row: int = 0) -> RewardFailed:
        answer = self.ask(self.group(row))
        assert isinstance(answer, RewardFailed), answer
        return answer


@pytest.fixture
def child(model_folder: Path, source: DataSource) -> Iterator[Child]:
    made = Child(model_folder, source)
    yield made
    made.service.close()


Functions = Callable[[str], Path]


def numbers(blob: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(blob) // 8}d", blob))


def test_rewards_are_the_weighted_sum_and_each_functions_values_are_kept(child: Child, functions: Functions) -> None:
    path = functions(
        "def right(completions, answer, **kwargs):\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [1.0 if a == '7' and t == 'seven' else 0 for t, a in zip(texts, answer)]\n"
        "def length(completion_ids):\n"
        "    return [len(ids) if len(ids) > 1 else None for ids in completion_ids]\n"
        "def seen(**kwargs):\n"
        "    assert {*kwargs} == {'answer', 'completion_ids', 'completions', 'images', 'level', 'prompts'}, kwargs\n"
        "    assert kwargs['level'] == [{'n': [1]}] * 3 and kwargs['images'] == [['a.png']] * 3\n"
        "    return [None, None, 9]\n"
    )
    opened = child.open((f"{path}:right", 2.0), (f"{path}:length", 0.5), (f"{path}:seen", 0.0))
    assert opened == RewardsOpened(cause=1, names=("right", "length", "seen"))
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


@pytest.mark.parametrize(
    ("body", "problem", "says"),
    [
        ("return [1.0]", RewardProblem.WRONG_COUNT, "1 reward for 3 completions"),
        ("return [float('nan'), 0, 0]", RewardProblem.NOT_FINITE, "sample 0: nan"),
        ("return [0, float('inf'), 0]", RewardProblem.NOT_FINITE, "sample 1: inf"),
        ("return [0, 0, 1e30]", RewardProblem.NOT_FINITE, "sample 2"),
        ("return ['1', 0, 0]", RewardProblem.WRONG_TYPE, "sample 0: str '1'"),
        ("return [0, True, 0]", RewardProblem.WRONG_TYPE, "sample 1: bool"),
        ("return None", RewardProblem.WRONG_TYPE, "NoneType"),
        ("raise KeyError('no such key')", RewardProblem.RAISED, "no such key"),
        ("return prompts[9]", RewardProblem.RAISED, "line 5, in bad"),
        ("sys.exit(0)", RewardProblem.RAISED, "SystemExit"),
        ("raise KeyboardInterrupt", RewardProblem.RAISED, "KeyboardInterrupt"),
        ("os._exit(0)", RewardProblem.RAISED, "ended with exit code 0"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", RewardProblem.RAISED, "ended by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", RewardProblem.RAISED, "ended by SIGKILL"),
        ("os.closerange(0, 65_536); return [0] * 3", RewardProblem.RAISED, "lost"),
        ("os.write(int(sys.argv[1]), b'garbage' * 9); time.sleep(60)", RewardProblem.RAISED, "lost"),
    ],
)
def test_a_function_that_fails_is_reported_by_name_and_row_and_the_next_group_is_scored(
    body: str, problem: RewardProblem, says: str, child: Child, functions: Functions
) -> None:
    path = functions(
        "import os, signal, sys, time\n"
        "def good(prompts): return [1.0] * len(prompts)\n"
        "def guarded(prompts, answer): return bad(prompts) if answer[0] == '7' else good(prompts)\n"
        f"def bad(prompts):\n    {body}\n"
    )
    child.open((f"{path}:good", 1.0), (f"{path}:guarded", 1.0))
    failure = child.failed()
    assert (failure.function, failure.problem) == ("guarded", problem)
    assert (failure.cause, failure.step, failure.group, failure.row) == (2, 3, 5, 0)
    assert says in failure.detail
    assert not failure.detail.startswith((" ", "returned"))
    assert "rewards/runner.py" not in failure.detail
    assert failure.place.endswith(".jsonl:1 (row 0)")
    assert numbers(child.rewarded(1).rewards) == [2.0] * 3


def test_a_column_that_a_row_lacks_is_reported(child: Child, functions: Functions) -> None:
    child.open((f"{functions('def f(answer): return [1] * len(answer)')}:f", 1.0))
    failure = child.failed(2)
    assert failure.problem is RewardProblem.RAISED
    assert failure.detail.startswith(
        "The function asks for what the row lacks: arguments ['answer'] (it may ask for some of"
    )
    child.rewarded(0)


HANGS = {
    "sleeping": "time.sleep(600)",
    "computing": "while True: pass",
    "holding the interpreter": "re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "deaf to signals": "[signal.signal(s, signal.SIG_IGN) for s in (10, 14, 15)], time.sleep(600)",
    "in a lock": "threading.Lock().__enter__(), (lock := threading.Lock()).acquire(), lock.acquire()",
    "waiting for a child": "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', __file__])",
}


@pytest.mark.parametrize("how", HANGS)
def test_a_function_that_hangs_is_cut_off_and_named(how: str, child: Child, functions: Functions) -> None:
    path = functions(
        "import os, re, signal, subprocess, sys, threading, time\n"
        "def good(prompts): return [1.0] * len(prompts)\n"
        "def slow(prompts):\n"
        f"    {HANGS[how]}\n"
    )
    child.open((f"{path}:good", 1.0), (f"{path}:slow", 1.0), limit_s=1.5)
    failure = child.failed()
    assert (failure.function, failure.problem, failure.row) == ("slow", RewardProblem.TIMED_OUT, 0)
    assert "no answer after 1.5 s" in failure.detail
    if how in {"sleeping", "computing", "holding the interpreter"}:
        assert f'File "{path}", line 4 in slow' in failure.detail
    assert processes_with("rollplex.rewards.runner", os.getpid()) == []
    wait_until(lambda: processes_with(str(path)) == [])


def test_after_a_time_out_the_child_answers_nothing_more(child: Child, functions: Functions) -> None:
    child.open((f"{functions('import time' + chr(10) + 'def f(): time.sleep(60)')}:f", 1.0), limit_s=0.2)
    assert child.failed().problem is RewardProblem.TIMED_OUT
    child.service.handle(child.group(), lambda _: pytest.fail("answered"))
    child.service.handle(Leave(reason="replaced"), lambda _: pytest.fail("answered"))


def test_the_limit_is_for_all_functions_together(child: Child, functions: Functions) -> None:
    path = functions("import time\ndef a(prompts):\n    time.sleep(1.0)\n    return [0] * len(prompts)\nb = a\n")
    child.open((f"{path}:a", 1.0), (f"{path}:b", 1.0), limit_s=1.7)
    failure = child.failed()
    assert (failure.function, failure.problem) == ("b", RewardProblem.TIMED_OUT)


def test_a_function_that_eats_memory_is_stopped_by_the_limit(child: Child, functions: Functions) -> None:
    path = functions("def f(prompts): return [len(bytearray(2**33))] * 3\ndef g(prompts): return [1] * 3\n")
    child.open((f"{path}:f", 1.0), memory=2**30)
    failure = child.failed()
    assert failure.problem is RewardProblem.RAISED
    assert "MemoryError" in failure.detail


def test_a_function_that_forks_is_answered_once(child: Child, functions: Functions) -> None:
    path = functions(
        "import os\ndef f(prompts):\n    children = [os.fork() for _ in range(3)]\n    return [1.0] * len(prompts)\n"
    )
    child.open((f"{path}:f", 1.0))
    for count in (3, 2, 1, 2):
        assert numbers(child.rewarded(0, TEXTS[:count]).rewards) == [1.0] * count


def test_what_functions_print_is_passed_on_up_to_a_limit(
    child: Child, functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollplex.rewards.process.OUTPUT_LIMIT_BYTES", 100_000)
    path = functions(
        "import sys\n"
        "print('imported')\n"
        "def f(prompts):\n"
        "    print('hello', file=sys.stderr)\n"
        "    for _ in range(100): print('x' * 100_000)\n"
        "    return [1.0] * len(prompts)\n"
    )
    child.open((f"{path}:f", 1.0))
    for _ in range(2):
        child.rewarded()
    text = child.printed.decode()
    assert "imported" in text
    assert "hello" in text
    assert text.count("is dropped") == 1
    assert len(text) < 101_000


def test_a_function_that_reads_its_input_gets_nothing(child: Child, functions: Functions) -> None:
    child.open((f"{functions('import sys' + chr(10) + 'def f(): return [len(sys.stdin.read())] * 3')}:f", 1.0))
    assert numbers(child.rewarded().rewards) == [0.0] * 3


def test_functions_see_neither_secrets_nor_files_of_the_run(
    child: Child, functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLPLEX_SECRET", "s")
    path = functions(
        "import os, sys\n"
        "def f():\n"
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
        ("def f(a, /): pass", "by position only"),
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

    path = functions("import time\ntime.sleep(600)\n")
    with pytest.raises(RewardError, match=r"(?s)does not end; got .*line 2") as caught:
        FunctionProcess([f"{path}:f"], 0, lambda _: None).start(limit_s=1.0)
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


def test_instructions_out_of_order_and_wrong_sizes_are_refused(child: Child, functions: Functions) -> None:
    with pytest.raises(StateError):
        child.ask(child.group())
    child.open((f"{functions('def f(prompts): return [1] * len(prompts)')}:f", 1.0))
    with pytest.raises(DataError, match="no such row"):
        child.ask(child.group(row=3))
    for responses in (
        Responses(group=0, lengths=(2,), tokens=b"1234"),
        Responses(group=0, lengths=(), tokens=b""),
    ):
        with pytest.raises(ProtocolError):
            child.ask(RewardGroup(cause=1, step=0, source="train", row=0, responses=responses))


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
    path = functions("import time\ndef f(): time.sleep(600)\n")
    code = (
        "import os, sys, threading, time\n"
        "from rollplex.rewards.process import FunctionProcess\n"
        "from rollplex.rewards.wire import Score\n"
        f"p = FunctionProcess([{str(path) + ':f'!r}], 0, lambda _: None)\n"
        "p.start()\n"
        "threading.Timer(0.3, lambda: os.kill(os.getpid(), 9)).start()\n"
        "print(p._process.pid, flush=True)\n"
        "p.score(Score(row=b'{\"prompt\": \"a\"}', texts=('a',), lengths=(0,), tokens=b''), 60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9
    pid = int(done.stdout)
    wait_until(lambda: pid not in processes_with("rollplex.rewards.runner"))


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_with(text: str, parent: int | None = None) -> list[int]:
    """Living processes, perhaps only children of one, with this on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, of = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if parent in {None, int(of)} and state != "Z" and text in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
