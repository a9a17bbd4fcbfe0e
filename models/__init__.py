"""The embedded default pair and how it was made (README.md beside this file).

`target/` and `draft/` are model folders; the modules are the recipe: `data`, `tokenizer`, `train_target`,
`distill_draft`, `evaluate`, in this order. Nothing that serves imports them.
"""
