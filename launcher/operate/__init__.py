"""Operating a run after its launch: status, logs, stop, collect, history, resume, attach; from any machine."""
