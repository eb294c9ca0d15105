"""Names of the files that a run writes into its folder. Formats: the modules beside this one."""

RUN_FILE = "run.json"
STEPS_FILE = "steps.jsonl"
# where a rank died, hung or failed
RANKS_FILE = "ranks.json"
REPORT_PAGE = "report.html"
REPORT_FILE = "report.json"
