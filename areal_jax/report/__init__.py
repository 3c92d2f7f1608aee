"""After the run: its report as JSON, Markdown and HTML, plots, timeline and limits, from the files of a workdir."""
