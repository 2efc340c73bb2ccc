"""A rollout service that shares no code with Rollplex, written from docs/protocol.md alone (its sections are named).

It maps the weights and samples by running the whole sequence again for every token: slow, and nothing to get wrong.
What it takes from an installed Rollplex is data, the output of two commands. Images only. It keeps no K/V.
"""

import contextlib, hashlib, json, mmap, os, queue, select, signal, socket, struct, subprocess, sys, time, zlib
from threading import Thread

import msgspec, numpy as np, zmq

ON_POLICY = True
pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


output = lambda *words: subprocess.check_output([sys.executable, "-m", *words], text=True)


def ask(stream, payload):  # section 3
    stream.sendall(b"RXFD" + struct.pack("<II", len(payload), 0) + payload)
    head, fds, _, _ = socket.recv_fds(stream, 12, 1)
    return stream.recv(struct.unpack("<4sII", head)[1], socket.MSG_WAITALL), fds


def join(run_dir, device, incarnation):  # sections 1 and 2
    schema = dict(line.split() for line in output("rollplex.protocol.reference", "--hashes").splitlines())["rollout"]
    hello = {"type": "Hello", "protocol": 1, "schema_hash": schema, "role": "rollout", "pid": os.getpid()}
    hello |= {"device": dict(zip(("node", "index"), map(int, device.split(":")))), "incarnation": incarnation}
    for _ in range(2400):
        with contextlib.suppress(OSError):  # there is no coordinator yet
            frame = b"RPLX\1\0" + pack(hello | {"secret": open(f"{run_dir}/secret", "rb").read()})
            stream = socket.socket(socket.AF_UNIX)
            stream.connect(f"{run_dir}/sockets/segments.sock")
            answer = unpack(ask(stream, frame)[0][6:])
            if answer["type"] == "Welcome":
                return stream, frame, answer
            assert answer["reason"] == "secret", f"refused: {answer}"  # exit code 1
        time.sleep(0.05)
    sys.exit("there is no coordinator")


class Rollout:  # sections 6 to 8: one method for each instruction
    def __init__(self, stream, send):
        self.stream, self.send, self.drained = stream, send, False

    def map(self, ref):
        fds = ask(self.stream, pack({"type": "Fetch", "segment": ref["segment"]}))[1]
        return np.frombuffer(mmap.mmap(fds[0], ref["size_bytes"]), np.uint8)  # raises, if it is smaller

    def header(self, version=None):
        word = int(self.actor[16:24].view(np.uint64)[0])
        assert word & 255 == 1 and version in (None, word >> 8), f"weights: {word >> 8}, {word & 255}; not {version}"
        return word >> 8

    def LoadRollout(self, m):
        import torch, transformers

        spec, dtype, self.torch = m["model"], m["model"]["dtype"], torch
        self.table = json.loads(
            output("rollplex.layout", spec["path"], dtype, *["--freeze-vision"] * spec["freeze_vision"])
        )
        assert self.table["hash"] == spec["table_hash"], "another parameter table"
        self.actor, self.never = self.map(m["actor"]), list(spec["never_sampled"])
        self.model = transformers.AutoModelForImageTextToText.from_config(
            transformers.AutoConfig.from_pretrained(spec["path"]), dtype=dtype
        ).eval()
        parameters = dict(self.model.requires_grad_(False).named_parameters())
        for e in self.table["entries"]:
            stored = torch.from_numpy(self.actor[e["offset"] :][: e["size_bytes"]])
            stored = stored.view(getattr(torch, dtype)).view(e["shape"])
            for p in e["pieces"]:  # views on the segment: no weight is copied
                part = stored[slice(*p["rows"])] if p["cols"] is None else stored[slice(*p["rows"]), slice(*p["cols"])]
                parameters[p["hf_name"]].data = part.view(p["hf_shape"])
        self.send("Loaded", cause=m["cause"], table_bytes=self.table["total_bytes"], on_policy=ON_POLICY)

    def GenerateUnit(self, m):
        assert not self.drained, "a unit while the weights may not be read"
        start_s, inputs, version = time.monotonic(), self.map(m["inputs"]), self.header(m["version"])
        same, images = {"cause": m["cause"], "step": m["step"]}, sum(bool(slot.get("media")) for slot in m["prompts"])
        for slot in m["prompts"]:
            tokens, values, stopped = zip(
                *(self.sample(slot, inputs, m, s) for s in range(m["sampling"]["group_size"]))
            )
            responses = {"lengths": list(map(len, tokens)), "tokens": np.concatenate(tokens).astype("<i4").tobytes()}
            logprobs = {"group": slot["group"], "values": np.concatenate(values).astype("<f8").tobytes()}
            said = {"responses": responses | {"group": slot["group"]}, "logprobs": logprobs, "stopped": stopped}
            said |= {"version_start": version, "version_end": self.header(version), "end_s": time.monotonic()}
            self.send("GroupFinished", **same, **said)
        times = {"start_s": start_s, "prefill_end_s": start_s, "end_s": time.monotonic(), "decode_steps": 0}
        self.send("UnitGenerated", **same, **times, unit=m["unit"], vision_prompts=images, held=[])

    def sample(self, slot, inputs, m, number):  # fields with a default may be absent
        torch, n, config, media = self.torch, slot["tokens"], self.model.config, {}
        how = {"top_k": 0, "top_p": 1.0, "stop_ids": [], **m["sampling"]}
        ids = torch.from_numpy(inputs[slot["ids_offset"] :][: 8 * n].view(np.int64).copy())[None]
        places = torch.from_numpy(inputs[slot["positions_offset"] :][: 24 * n].view(np.int64).copy()).view(3, 1, n)
        if slot.get("media"):
            grids = [[i["frames"], i["height"], i["width"]] for i in slot["media"]]
            width = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
            rows = [inputs[i["offset"] :][: 4 * width * int(np.prod(g))] for i, g in zip(slot["media"], grids)]
            pixels = torch.from_numpy(np.concatenate(rows).view(np.float32)).view(-1, width)
            media |= {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
        key = (how["seed"], how["purpose"], m["step"], slot["row"], number)  # section 7: no stream to lose
        random, tokens, told = np.random.default_rng(zlib.crc32(repr(key).encode())), [], []
        while len(tokens) < how["max_new_tokens"] and not (tokens and tokens[-1] in how["stop_ids"]):
            given = {
                "input_ids": ids,
                "position_ids": places,
                "mm_token_type_ids": (ids == config.image_token_id).int(),
            }
            hidden = self.model.model(**given, **media, use_cache=False).last_hidden_state[0, -1]
            logits = (hidden @ self.model.lm_head.weight.T).double()
            logits[self.never] = -torch.inf
            logprobs = torch.log_softmax(logits / (how["temperature"] or 1.0), -1).numpy()
            order = np.argsort(-logprobs, kind="stable")[: how["top_k"] or None if how["temperature"] else 1]
            weights = np.exp(logprobs[order])
            kept = weights[: int((weights.cumsum() < how["top_p"] * weights.sum()).sum()) + 1].cumsum()
            tokens.append(int(order[np.searchsorted(kept, random.random() * kept[-1], side="right")]))
            told.append(logprobs[tokens[-1]])
            ids = torch.cat([ids, torch.tensor([[tokens[-1]]])], 1)
            places = torch.cat([places, torch.full((3, 1, 1), slot["next_position"] + len(tokens) - 1)], 2)
        return tokens, told, tokens[-1] in how["stop_ids"]

    def Drain(self, m):
        self.drained = True
        self.send("Drained", cause=m["cause"], version=m["version"])

    def Committed(self, m):  # nothing was kept that depends on old weights
        self.drained = False
        self.send("CachesDropped", cause=m["cause"], version=self.header(m["version"]))

    def DigestRequest(self, m):
        words, u = self.actor[4096:].view(np.uint64), np.uint64
        x = words + (keys := (2 * np.arange(len(words), dtype=u) + u(1)) * u(0x9E3779B97F4A7C15))
        for _ in range(2):
            x = (x ^ (x >> u(32))) * u(0xD6E8FEB86659FD93)
        x ^= x >> u(32)
        lanes = struct.pack("<QQQ", len(words), int(x.sum()), int((x * keys).sum()))
        digest = hashlib.blake2b(b"rollplex digest 2" + bytes.fromhex(self.table["hash"]) + lanes, digest_size=32)
        self.send("DigestReply", cause=m["cause"], version=self.header(), digest=digest.hexdigest())


def work(service, inbox, send):  # one instruction after the other; section 5
    cause = 0
    try:
        while message := inbox.get():
            assert message["cause"] > cause, f"cause {message['cause']} came twice"
            cause = message["cause"]
            getattr(service, message["type"])(message)
    except Exception as error:
        send("Failed", cause=cause, error={"kind": type(error).__name__, "what": str(error)})


def main():  # section 4: this thread acknowledges while the other one computes
    inbox, outbox = queue.SimpleQueue(), queue.SimpleQueue()
    send = lambda kind, **fields: outbox.put({"type": kind, **fields})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: send("Leaving", reason="SIGTERM"))
    args = {"--device": "0:0", "--incarnation": "1", **dict(zip(sys.argv[1::2], sys.argv[2::2]))}
    run_dir, device, number = (args[name] for name in ("--run-dir", "--device", "--incarnation"))
    stream, hello, welcome = join(run_dir, device, int(number))
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, f"rollout/{device}/{number}".encode())
    dealer.setsockopt(zmq.MAXMSGSIZE, welcome["max_frame_bytes"])
    dealer.connect(f"ipc://{run_dir}/sockets/control.sock")
    dealer.send(hello)
    dealer.recv()  # Welcome
    (ended := select.poll()).register(stream, select.POLLRDHUP)
    Thread(target=work, args=(Rollout(stream, send), inbox, send), daemon=True).start()
    progress, alive_s, end_s, code = 0, 0.0, np.inf, 0
    while time.monotonic() < end_s and not ended.poll(0):
        if dealer.poll(2):
            message = unpack(dealer.recv())
            if message["type"] == "Leave":
                os._exit(0)
            dealer.send(pack({"type": "Received", "cause": message["cause"]}))
            inbox.put(message)
        while not outbox.empty():
            answer, progress = outbox.get(), progress + 1
            dealer.send(pack(answer))
            if answer["type"] in ("Failed", "Leaving"):
                code = int(answer["type"] == "Failed")
                end_s = time.monotonic() + (0.2 if code else welcome["grace_s"])
        if time.monotonic() > alive_s:
            alive_s = time.monotonic() + welcome["alive_every_s"]
            dealer.send(pack({"type": "Alive", "progress": progress}))
    os._exit(3 if ended.poll(0) else code)


main()
