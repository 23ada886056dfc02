package flow_test

import (
	"fmt"

	"natsflow/flow"
)

// Any string becomes one token of a subject, and another string another one.
func ExampleAppendToken() {
	for _, key := range []string{"ATL", "10.0.0.1", "two words", ""} {
		fmt.Printf("%s\n", flow.AppendToken([]byte("counts."), key))
	}
	// Output:
	// counts.ATL
	// counts.10=2E0=2E0=2E1
	// counts.two=20words
	// counts.=
}
