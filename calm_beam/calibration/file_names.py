"""What the files of a result are called, beside its manifest."""

RISK_TABLE = "risk_table.csv"
FAILURES = "failures.jsonl"
REPORT = "report.html"
