"""The same columns, of one type each, for all Parquet files: pandas writes integers as floats where some are missing, for example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from offload.errors import ConfigError, RunError

Types = Mapping[str, pa.DataType]
"""The type of each column by name."""


def types_of(schema: pa.Schema, columns: Iterable[str] | None) -> Types:
    """The types of these columns, or of all, once they are read. Categories count as their values, and views as what they show."""
    names = schema.names if columns is None else columns
    return {name: _plain(schema.field(name).type) for name in names if schema.get_field_index(name) >= 0}


def common_types(files: Sequence[tuple[str, Types]]) -> Types:
    """The types that hold the values of all files, for the columns whose types differ between files or that some files lack.

    Raises ConfigError if a column has no such type.
    """
    first: dict[str, tuple[str, pa.DataType]] = {}
    common: dict[str, pa.DataType] = {}
    for file, types in files:
        for name, kind in types.items():
            earlier, known = first.setdefault(name, (file, kind))
            if kind == (so_far := common.get(name, known)):
                continue
            try:
                common[name] = _merged(so_far, kind)
            except pa.ArrowException:
                raise ConfigError(
                    f"column {name!r} is {known} in {earlier!r} and {kind} in {file!r}. Write both files with one type, or name "
                    "the columns to read without it: parquet(columns=[...])."
                ) from None
    lacked = {name: kind for name, (_, kind) in first.items() if any(name not in types for _, types in files)}
    return {**lacked, **common}


def cast(table: pa.Table, types: Types, file: str) -> pa.Table:
    """The table of a file with these types, and with values in place of categories and views. Raises RunError for a value outside its
    type."""
    for number, field in enumerate(table.schema):
        kind = types.get(field.name, _plain(field.type))
        if field.type == kind:
            continue
        try:
            # As in NumPy, a large integer among floats is rounded.
            column = table.column(number).cast(kind, safe=not pa.types.is_floating(kind))
        except pa.ArrowException as error:
            raise RunError(
                f"column {field.name!r} of {file!r} cannot become {kind}, which its other files need: {error}. Write all files "
                "with one type."
            ) from None
        table = table.set_column(number, field.name, column)
    return table


def completed(table: pa.Table, types: Types) -> pa.Table:
    """The table with the columns of other files, which hold nothing here."""
    for name, kind in types.items():
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, kind))
    return table


_OF_VIEWS = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}
"""DataFusion and delta-rs write columns of such types, and Arrow cannot take rows of them."""


def _plain(kind: pa.DataType) -> pa.DataType:
    return _without_views(kind.value_type if pa.types.is_dictionary(kind) else kind)


def _without_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct(
            [each.with_type(_without_views(each.type)) for each in map(kind.field, range(kind.num_fields))]
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = kind.value_field.with_type(_without_views(kind.value_type))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(inner, kind.list_size)
        return pa.list_(inner) if pa.types.is_list(kind) else pa.large_list(inner)
    return _OF_VIEWS.get(str(kind), kind)


def _merged(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    schemas = [pa.schema([("", one)]), pa.schema([("", other)])]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
