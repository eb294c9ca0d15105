"""Names of the files that a run writes into its folder. Formats: the modules beside this one."""

RUN_FILE = "run.json"
STEPS_FILE = "steps.jsonl"
# where a rank died, hung or failed
RANKS_FILE = "ranks.json"
# what each rank said of itself last, under `megatron-lite watch`: and its number, or pid-PID without one, and .json
LAST_WORDS = "last_words-"
# the flight recorder of each rank: and its number
FLIGHT_RECORDINGS = "flight/rank-"
# stacks of each rank: and its number, and .json by py-spy, .txt by faulthandler
STACKS = "stacks/rank-"
REPORT_PAGE = "report.html"
REPORT_FILE = "report.json"
# of a report with what it was made from
BUNDLE_ENDINGS = (".zip", ".tar.gz", ".tgz")
# in a bundle: what a failed job left
EVIDENCE_FILE = "job_evidence.json"
