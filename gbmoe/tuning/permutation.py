"""How the threads of the padded gather share a row, and how many CTAs share the sort of a plan."""

# Where a token's row is written to several slots, each thread copies two vectors (of 16 bytes, if these divide the row) of rows that
# have at most this many vectors, and four of longer rows. Measured from 128 to 896 vectors.
SHORT_ROW = 256

# A plan, and the row map of a mask, sort slots or tokens in at most this many chunks, with a CTA for each. Every CTA reads the counts of
# all chunks, so that more chunks do not always take less time.
MOST_CHUNKS = 128
