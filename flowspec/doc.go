// Package flowspec reads flows that are written in YAML and makes them flows of
// package flow.
//
// [Load] and [Parse] check everything that can be known before a flow runs:
// names, types, expressions, placeholders, the order of the steps. They report
// all mistakes of a file together, each an [*Error] with its line and column.
// [Spec.Build] makes the flow, [Spec.Plan] describes it. docs/YAML.md is the
// reference of the language.
//
// # Records
//
// A record stays the bytes of its payload. A step looks up just the members that
// it names (with gjson); the place where one is copied gets its bytes as they
// are. The result of an aggregate is not even JSON until it leaves the flow: it
// is a pointer to the state of its key.
//
// # Sources and lists
//
// A flow is a graph of lists of steps. Each list reads sources or other lists;
// several are merged, and what several lists read is branched. They are parsed and
// built in an order in which each is behind those that it reads, so that what is
// known of the records at a step (the members, the key, the sources) goes with them.
// A flow with one source and no named lists is one list without a name; nothing in
// it, such as the id that a step gets, depends on there being others.
//
// # Expressions
//
// The language is expr (github.com/expr-lang/expr). Names, literals and
// operators are compiled to closures over unboxed values; the rest runs in the
// virtual machine of expr, on a tree in which the operators are replaced by the
// very same functions. The operators follow SQL where a value is null. What has
// no bound, or differs from run to run, is refused when the flow is read: ranges,
// predicates inside predicates, now().
package flowspec
