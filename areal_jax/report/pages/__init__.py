"""The pages of a report: Markdown, HTML, plots."""
