"""SGLang as the rollout engine, over weights that somebody else owns.

    rollout process                                    scheduler process (SGLang's)
    service ── engine ── streams ── runtime ── ZMQ ──► Scheduler ── ModelRunner
                  │                                        │  loader: every parameter points into the segment
                  └── remote ── unix socket, descriptor ──►┘  serving: header, digest, where the parameters lie

Only `runtime`, `scheduler` and `loader` import SGLang, and nothing imports them before the engine is asked for.
"""
