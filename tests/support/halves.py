"""The halves of the package: what trains, what watches, predicts, explains and draws, and what a user calls."""

from support.package_files import FILES, place

HALVES = {
    "trainer": {
        "model",
        "cpu_kernels",
        "data",
        "parallel",
        "optim",
        "checkpoint",
        "convert",
        "generate",
        "observers",
        "train",
        "replay",
        "app",
        "smoke",
        "tensor_holders",
    },
    "instruments": {"instruments", "watch", "script_record"},
    "planner": {"planner"},
    "walk": {"walk"},  # of a plan: it takes a real step of the trainer
    "rehearsal": {
        "rehearsal",
        "script_walk",
    },  # have the explainer read snapshots of walks: of a plan, of scripts of others
    "explainer": {"analysis"},
    "renderers": {"report", "bundle"},  # for people, and for strangers
    "tuner": {"tune"},
    "entry": {"__main__", "run_planner"},  # hands the planner to the trainer, and words to commands
    "commands": {"cli", "notebook", "mcp_server"},
}
PLACES = {place(path) for path in FILES} - {"__init__"}
# what all halves stand on: formats of files, flags, and small files at the top
HALVES["shared"] = PLACES.difference(*HALVES.values())
HALF_OF_PLACE = {name: half for half, places in HALVES.items() for name in places}
# half: the halves that imports lead it to, whatever lies between
REACHES = {
    "shared": set(),
    "trainer": {"shared", "instruments"},
    "instruments": {"shared", "trainer"},
    "planner": {"shared"},
    "walk": {"shared", "trainer", "instruments", "planner"},
    "rehearsal": {"shared", "trainer", "instruments", "planner", "walk", "explainer"},
    "explainer": {"shared"},
    "renderers": {"shared", "planner", "explainer"},
    "tuner": {"shared", "explainer"},
    "entry": {"shared", "trainer", "instruments", "planner", "commands"},
    "commands": {"shared", "trainer", "planner", "explainer", "renderers", "tuner"},
}
# Where torch may be imported. What another half reaches of the trainer are files without torch; commands import it late.
WITH_TORCH = {"trainer", "instruments", "walk", "rehearsal", "entry"}
WITHOUT_TORCH = PLACES.difference(*(HALVES[half] for half in WITH_TORCH))
