"""Run by itself: what torch sees of this machine, as one JSON line. In a process of its own, so that nothing stays on the GPU."""

import json
import sys


def main():
    try:
        import torch
    except ImportError:
        print(json.dumps({"torch": None}))
        return
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "devices": torch.cuda.device_count(),
            "memory_bytes": properties.total_memory,
            "capability": list(torch.cuda.get_device_capability(0)),
            "multiprocessors": properties.multi_processor_count,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    print(json.dumps(facts))


if __name__ == "__main__":
    sys.exit(main())
