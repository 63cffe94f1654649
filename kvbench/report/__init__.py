"""From records to tables, figures, the page and W&B; knows nothing of methods or models.

- `runs`: the runs of a folder in groups, a model on a task with its variants
- `frame`: the tidy frame of a group, every number with its interval and mark (`stats`)
- `tables`: which table is of which groups, and what a ranking says in a sentence; `published` numbers
- `figures`: what is drawn, once, for page and files; how is in `drawing`, in which colours in `style`
- `render`: a table as text, CSV, Markdown and LaTeX; `page` is HTML
- `build` writes it all; `wandb` logs it
"""
