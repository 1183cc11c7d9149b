"""The page of figures, `BENCHMARKS.md`: what was measured, by which command, when and where.

The page is made of the table of benchmarks (`table`), the record of each one's last run
(`measured/`) and what people noted beside (`notes/`). A run of this package's script makes records
and writes the page. A test holds that the page is what they give. So each figure has its command,
its date, its commit and its machine. A benchmark that has changed since its last run says so.
"""
