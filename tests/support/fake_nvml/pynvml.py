"""A stand-in for nvidia-ml-py, with devices that a script describes: FAKE_NVML names a JSON file, or holds the JSON.

{"GPU-1": {"sm_clock_mhz": 1980, "errors": {"nvmlDeviceGetPowerUsage": 4}}}. A value that is a list is told one by one, the
last one for ever. `errors` are NVML's numbers, by function; `lost_after` is the number of calls after which the GPU is lost.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

ERRORS = {
    1: "Uninitialized",
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    9: "Driver Not Loaded",
    10: "Timeout",
    13: "Function Not Found",
    15: "GPU is lost",
    999: "Unknown Error",
}
HEALTHY = {
    "sm_clock_mhz": 1980,
    "memory_clock_mhz": 2619,
    "reasons": 0,
    "temperature_c": 61,
    "power_mw": 640_000,
    "utilization": 99,
    "max_sm_clock_mhz": 1980,
    "power_limit_mw": 700_000,
    "slowdown_c": 87,
    "pcie_width": 16,
    "max_pcie_width": 16,
    "ecc_corrected": 0,
    "ecc_uncorrected": 0,
    "remapped": [[0, 0, 0, 0]],
    "nvlink": 0,
    "pcie_replays": 0,
    "xids": [],
}
GAUGES = {
    "nvmlDeviceGetTemperature": "temperature_c",
    "nvmlDeviceGetPowerUsage": "power_mw",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_mw",
    "nvmlDeviceGetTemperatureThreshold": "slowdown_c",
    "nvmlDeviceGetCurrPcieLinkWidth": "pcie_width",
    "nvmlDeviceGetMaxPcieLinkWidth": "max_pcie_width",
    "nvmlDeviceGetPcieReplayCounter": "pcie_replays",
    "nvmlDeviceGetCurrentClocksEventReasons": "reasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "reasons",
    "nvmlDeviceGetRemappedRows": "remapped",
}


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(value)
        self.value = value

    def __str__(self):
        return ERRORS.get(self.value, f"NVML error {self.value}")


class Device:
    """One device, as the script describes it."""

    def __init__(self, name, told):
        self.name = name
        self.told = HEALTHY | told
        self.calls = 0
        self.at = {}
        self.xids = list(self.told["xids"])

    def tell(self, function, key):
        self.calls += 1
        code = self.told.get("errors", {}).get(function)
        if code is not None:
            raise NVMLError(code)
        lost_after = self.told.get("lost_after")
        if lost_after is not None and self.calls > lost_after:
            raise NVMLError(15)
        value = self.told[key]
        if isinstance(value, list):
            place = self.at.get(key, 0)
            self.at[key] = place + 1
            return value[min(place, len(value) - 1)]
        return value


devices: dict[str, Device] = {}
init_error = 0


def read_script(text: str) -> None:
    """Take a script of devices in the place of the one before."""
    global init_error
    told = json.loads(text)
    init_error = told.pop("init-error", 0)
    devices.clear()
    devices.update({name: Device(name, values) for name, values in told.items()})


def nvmlInit():
    given = os.environ.get("FAKE_NVML", "")
    if given and not devices:
        read_script(given if given.startswith("{") else Path(given).read_text())
    if init_error:
        raise NVMLError(init_error)


def nvmlShutdown():
    pass


def nvmlDeviceGetHandleByUUID(name):
    if name not in devices:
        raise NVMLError(6)
    return devices[name]


def nvmlDeviceGetHandleByPciBusId(name):
    for device in devices.values():
        if device.told.get("pci") == name:
            return device
    raise NVMLError(6)


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device):
    if "parent" not in device.told:
        raise NVMLError(2)
    return devices[device.told["parent"]]


def nvmlDeviceGetClockInfo(device, kind):
    return device.tell("nvmlDeviceGetClockInfo", {1: "sm_clock_mhz", 2: "memory_clock_mhz"}[kind])


def nvmlDeviceGetMaxClockInfo(device, kind):
    return device.tell("nvmlDeviceGetMaxClockInfo", {1: "max_sm_clock_mhz"}[kind])


def nvmlDeviceGetUtilizationRates(device):
    return SimpleNamespace(gpu=device.tell("nvmlDeviceGetUtilizationRates", "utilization"))


def nvmlDeviceGetTotalEccErrors(device, kind, since):
    assert since == 0
    return device.tell("nvmlDeviceGetTotalEccErrors", ("ecc_corrected", "ecc_uncorrected")[kind])


def nvmlDeviceGetFieldValues(device, fields):
    count = device.tell("nvmlDeviceGetFieldValues", "nvlink")
    values = [SimpleNamespace(nvmlReturn=0, valueType=3, value=SimpleNamespace(ullVal=count))]
    return [*values, *(SimpleNamespace(nvmlReturn=3, valueType=0, value=None) for _ in fields[1:])]


def nvmlEventSetCreate():
    return []


def nvmlDeviceRegisterEvents(device, kinds, events):
    device.tell("nvmlDeviceRegisterEvents", "reasons")
    assert kinds == 8
    events.append(device)


def nvmlEventSetWait_v2(events, milliseconds):
    assert milliseconds == 0
    for device in events:
        if device.xids:
            return SimpleNamespace(eventData=device.xids.pop(0))
    raise NVMLError(10)


def nvmlEventSetFree(events):
    events.clear()


def _add(function, key):
    def tell(device, *arguments):
        return device.tell(function, key)

    globals()[function] = tell


for _function, _key in GAUGES.items():
    _add(_function, _key)
