"""A head measured by decoding with it: acceptance, speed, the best tree, the report."""
