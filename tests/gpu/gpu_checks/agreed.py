"""What the command and its tests agree on; needs nothing."""

DEVICE_VARIABLE, KEEP_VARIABLE = "GPU_CHECKS_DEVICE", "GPU_CHECKS_KEEP"  # where to run; the folder of --out
MAX_BYTES, MAX_FILES = 16 * 2**20, 8  # of --out: a machine that is lent for minutes may hand back no more
