"""Writes a run for other launchers: Kubernetes manifests, an sbatch script, shell scripts."""
