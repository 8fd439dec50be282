"""The parts of `app.py`, beside the card and the requirements of the Space that it runs on.

- `uploads`: what visitors hand in, read or refused.
- `panels`: what they are shown, as markup; `app.css` is its look.
- `results`: the benchmark's plots, and the box for SQL over its rows.
"""
