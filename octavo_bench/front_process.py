"""What ``octavo bench front`` measures: ``python -m octavo_bench.front_process PORT STEP_MS MODEL``."""

from __future__ import annotations

import sys

from octavo.config import ServeConfig
from octavo.server import serving


def main() -> int:
    """Serve ``MODEL``'s tokenizer in front of a paced engine until SIGTERM."""
    port, step_ms, model = sys.argv[1:]
    config = ServeConfig.from_flat(
        {"model": model, "port": int(port), "log_level": "error", "served_model_name": "paced"}
    )
    argv = [sys.executable, "-m", "octavo_bench.paced_engine", step_ms]
    return serving.run(config, engine_argv=argv)


if __name__ == "__main__":
    sys.exit(main())
