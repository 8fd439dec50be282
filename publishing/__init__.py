"""How ARR-COC gets to the Hub: `publish.py` is the command line."""
