"""The page of a run: the board shows it live, the report is the same page with its data inside.

    events.jsonl -> reading -> digest -> sections of panels -> the page (HTML; a browser prints it as PDF)

Nothing here imports torch, and nothing but the event log is read.
"""
