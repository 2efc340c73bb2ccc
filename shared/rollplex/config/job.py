"""Sections that decide how a run is carried out: run, memory, deadlines, http, checkpoint, eval, services.

Each section checks its own fields; what concerns several sections is in `checks`.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rollplex.config.base import FilePath, RunName, Section, Size, dataset_folder
from rollplex.journal.phases import MOST_ITERATIONS

Seconds = Annotated[float, Field(gt=0.0, le=7 * 24 * 3600.0)]


class RunSection(Section):
    """The run as a whole."""

    name: RunName = "run"
    """Names the run in files, logs and metrics."""
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0
    """Every random draw is a function of this number and of what it is drawn for."""
    iterations: Annotated[int, Field(ge=1, le=MOST_ITERATIONS)] = 100
    """Optimizer steps of the whole run; also the length of the learning-rate schedule."""
    schedule: Literal["serial", "overlap", "stream"] = "overlap"
    """When prefix and training work is done: after the rollout, prefixes during it, or finished groups trained during
    it. The result is the same."""
    alternate: Annotated[tuple[Literal["serial", "overlap", "stream"], ...], Field(max_length=16)] = ()
    """For benches: the schedules of the iterations in turn, over and over, in place of `schedule`. Empty: off."""
    share_prefix: bool = True
    """False: each prompt's prefix is computed once per response (the replicated baseline)."""
    deterministic: bool = True
    """True: only algorithms that give the same bits each time."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Arithmetic threads of each worker process. Part of the result's bits."""
    restarts: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """How often in a run all workers are started again, over the same weights, when one of them died, hung or failed;
    what was under way is done again. 0: that ends the run."""
    tensorboard: bool = True
    """True: every iteration's and evaluation's numbers are also written for TensorBoard, into the run directory."""
    log_completions: Annotated[int, Field(ge=0)] = 1
    """Groups of each iteration, from the first on, whose responses are written to completions.jsonl. 0: none.
    Evaluations write all of theirs."""
    log_tokens: bool = False
    """True: the responses of training in completions.jsonl have their token ids and log-probabilities too, those of the
    rollout and of the trainer, so that they can be replayed (rollout.engine) and compared (`rollplex bench gap`)."""
    sample_every: Annotated[int, Field(ge=0)] = 50
    """Iterations between tables of samples (pictures, prompts, responses, rewards, advantages) in the run directory
    and in TensorBoard, the first iteration has one. 0: none."""
    sample_groups: Annotated[int, Field(ge=1, le=64)] = 4
    """Groups in such a table: the first ones of the iteration."""

    keep_gradients: bool = False
    """True: the summed gradient of each iteration is kept in the run directory, as it was before the update: as many
    bytes as the trained weights. For comparisons (`rollplex bench gradients`)."""

    @property
    def streams(self) -> bool:
        """Whether any iteration is under the schedule stream, which needs the most memory."""
        return "stream" in (self.alternate or (self.schedule,))

    def schedule_of(self, step: int) -> Literal["serial", "overlap", "stream"]:
        """The schedule of iteration `step`, from 0."""
        return self.alternate[step % len(self.alternate)] if self.alternate else self.schedule

    def sampled(self, step: int) -> int:
        """How many groups of step `step` go into a table of samples; 0: there is none."""
        return self.sample_groups if self.sample_every and step % self.sample_every == 0 else 0


class DeviceSection(Section):
    """What the workers compute on."""

    kind: Literal["host", "cuda"] = "host"
    """host: this machine's processors and memory. cuda: a GPU for each of `parallel.devices`, whose memory the workers
    of the device share."""
    gpu: Annotated[int, Field(ge=0, le=1023)] = 0
    """Which GPU, as nvidia-smi numbers them; of several the first."""
    sharing: Literal["mps", "turns"] = "mps"
    """How the workers share the GPU: at the same time, by an MPS daemon that the node starts, or in turns."""
    prefix_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the GPU's multiprocessors that prefix work keeps to while the rollout decodes. `rollplex tune share`
    measures the best one."""
    decode_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of them that decoding keeps to (engine sglang)."""
    window: Literal["rollout", "decode"] = "rollout"
    """From when prefix work may run beside the rollout: from its begin, or once the prompts of a decode batch have been
    read, which uses the GPU as fully as prefix work does."""


class ParallelSection(Section):
    """Several devices: how the model is split over them, and which do what."""

    devices: Annotated[int, Field(ge=1, le=1024)] = 1
    """Devices of the node that the run uses: GPUs from `device.gpu` on; on hosts each is a share of the memory."""
    training: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor-parallel degree of trainer and prefix; the rest of the devices are replicas of them with other prompts."""
    rollout: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor-parallel degree of the rollout; the rest of its devices are further engines."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """colocated: every device samples and trains, on one storage of the weights. disaggregated: the last
    `rollout_devices` only sample, and the weights are copied there after each update (a baseline)."""
    rollout_devices: Annotated[int, Field(ge=0, le=1023)] = 0
    """Devices that only sample, if the placement is disaggregated."""

    @property
    def workers(self) -> int:
        """Processes that compute: a trainer and a prefix where it is trained, a rollout where it is sampled."""
        return 2 * (self.devices - self.rollout_devices) + (self.rollout_devices or self.devices)

    @property
    def replicas(self) -> int:
        """Teams of trainer and prefix; at least 1, also before the degrees are checked."""
        return max(1, (self.devices - self.rollout_devices) // self.training)

    @property
    def engines(self) -> int:
        """Teams of the rollout, likewise."""
        return max(1, (self.rollout_devices or self.devices) // self.rollout)


class MemorySection(Section):
    """What the ledger may grant."""

    budget: Size | None = None
    """Bytes for everything on the device, or on all devices in equal shares. Absent: on a GPU all that is free when the
    run begins, of several as much of each as is free on all; else half of what the host or our control group has, if
    that is less."""
    overhead: Size | None = None
    """Bytes of the budget set aside for what no lease covers: the processes themselves, and on a GPU their contexts,
    graphs and buffers. Absent: what was measured (1280 MiB on a host, 320 MiB more for each worker beyond three, 8 GiB
    on each GPU, found on one)."""
    prefix_activations: Literal["keep", "layers", "recompute", "recompute_layers"] = "keep"
    """What an actor prefix keeps between its forward and its backward: everything, the inputs of its layers, or
    nothing. What is not kept is computed again; with recompute all at once, with recompute_layers a layer at a time,
    which takes the least memory and the most time."""
    optimizer: Literal["device", "host"] = "device"
    """Where the optimizer's state lies. host: in host memory, and it passes through the GPU in pieces while the weights
    are stepped: slower, with the same result, and a GPU that is free of it."""


class DeadlinesSection(Section):
    """How long each kind of wait may last, in seconds. A wait that lasts longer is an error: it ends the run, or all
    workers start again (run.restarts)."""

    start_s: Seconds = 120.0
    """From starting a process to its handshake."""
    ack_s: Seconds = 10.0
    """From sending an instruction to its acknowledgement."""
    load_s: Seconds = 600.0
    """Checking the data; loading the model."""
    unit_s: Seconds = 600.0
    """One unit of rollout, prefix, scoring, training, or reward work."""
    update_s: Seconds = 300.0
    """The optimizer step, from the drain to the commit."""
    checkpoint_s: Seconds = 600.0
    """Writing one checkpoint."""
    leave_s: Seconds = 5.0
    """From being told to leave to being ended by a signal."""


class HttpSection(Section):
    """The control API."""

    host: Annotated[str, Field(min_length=1, max_length=255)] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """TCP port. 0: any free one; the run directory says which."""
    allow_remote: bool = False
    """True: `host` may be an address that other machines reach."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach `host`."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class CheckpointSection(Section):
    """When weights and optimizer state are written to the run directory."""

    every: Annotated[int, Field(ge=0)] = 100
    """Iterations between checkpoints. 0: only one, at the end."""
    at_end: bool = True
    """False: none at the end either, so that what was learned since the last one is lost. For benches."""
    keep: Annotated[int, Field(ge=1)] = 2
    """How many of the newest checkpoints stay."""

    def due(self, step: int, *, last: bool) -> bool:
        """Whether a checkpoint is written after `step` iterations; `last`: no further iteration follows."""
        return (last and self.at_end) or (self.every > 0 and step > 0 and step % self.every == 0)


class EvalSection(Section):
    """One evaluation: greedy responses to every row of a dataset at a fixed weights version. Changes nothing."""

    name: RunName
    """Names it in eval.jsonl and in metrics. Absent: the name of the data's file, without its ending."""
    data: FilePath
    """File or folder, rows as in training."""
    split: Annotated[str, Field(max_length=256)] = ""
    """As data.split."""
    image_dir: FilePath | None = None
    """As data.image_dir. Absent: the folder of `data`."""
    every: Annotated[int, Field(ge=0)] = 0
    """Iterations between evaluations; if not 0, also one before the first iteration. One at the end in any case."""
    limit: Annotated[int, Field(ge=0)] = 0
    """Only the first so many good rows. 0: all."""

    @property
    def image_folder(self) -> Path:
        """`image_dir`, or where the dataset is."""
        return self.image_dir or dataset_folder(self.data)

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to evaluate after `step` iterations (0: before the first); `last`: no further iteration follows."""
        return last or (self.every > 0 and step % self.every == 0)


Command = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


class ServicesSection(Section):
    """Other implementations of a service: the command that starts one. Absent: ours."""

    rollout: Command | None = None
    """Program and arguments; the coordinator's own arguments are appended."""
    prefix: Command | None = None
    """Program and arguments; the coordinator's own arguments are appended."""
    trainer: Command | None = None
    """Program and arguments; the coordinator's own arguments are appended."""
