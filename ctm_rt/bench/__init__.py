"""How fast decode attention is on this GPU: what ``ctm-rt bench`` runs."""
