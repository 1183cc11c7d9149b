"""Operations that rearrange data: shapes, slices, joins and windows."""
