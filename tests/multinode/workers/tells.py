"""What the launcher gave a rank, as a JSON file per rank: argv = directory, anything."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

NAMES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
         "TORCHELASTIC_MAX_RESTARTS")

told = {name: os.environ.get(name) for name in NAMES} | {"argv": sys.argv[2:]}
(Path(sys.argv[1]) / f"{told['RANK']}.json").write_text(json.dumps(told))
