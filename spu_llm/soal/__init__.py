"""SOAL: outliers tamed by prefix tokens, ranges narrowed by scaling, cheap softmax references (ICLR 2026)."""
