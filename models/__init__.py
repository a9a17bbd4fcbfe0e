"""How the embedded pair, `specdec/embedded`, was made (README.md beside this file).

The modules are the recipe: `data`, `tokenizer`, `train_target`,
`distill_draft`, `evaluate`, in this order. Nothing that serves imports them.
"""
