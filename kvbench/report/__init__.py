"""From records to tables, figures, the page and W&B; knows nothing of methods or models.

- `experiment`: the runs of a folder in groups, a model on a task with its variants (`variants`)
- `frame`: the tidy frame of a group, every number with its interval (`stats`) and mark (`marks`)
- `tables`: which table is of which groups; others are in `probe_tables` and `published`
- `verdicts`: what is said in sentences
- `figures`: what is drawn, by matplotlib for files (`drawing`, `panels`), by Vega on the page (`charts`)
- `render`: a table as text, CSV, Markdown and LaTeX; `page` is HTML
- `build` writes it all; `wandb` logs it
"""
