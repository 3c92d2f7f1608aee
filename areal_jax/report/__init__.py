"""After the run: report.json, report.md, plots, timeline and limits, made from the files of a workdir."""
