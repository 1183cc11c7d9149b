"""Operations that lay data out anew: shapes, slices, joins and windows."""
