"""POST: the client drafts with a public model, one secure pass verifies, and what is sampled follows the target's distribution."""
