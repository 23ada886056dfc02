package flow_test

import (
	"encoding/json"
	"fmt"

	"natsflow/flow"
)

// State that was stored as a number is a struct in version 2. What an earlier
// version of the program has stored goes through migrate when a task starts.
func ExampleJSONState() {
	type visits struct{ Count, Pages int }
	codec := flow.JSONState(2, func(version int, data []byte, s *visits) error {
		if version != 1 {
			return fmt.Errorf("there was no version %d", version)
		}
		return json.Unmarshal(data, &s.Count)
	})
	var s visits
	if err := codec.Migrate(1, []byte("7"), &s); err != nil {
		fmt.Println(err)
		return
	}
	data, err := codec.Append(nil, &s)
	fmt.Println(string(data), err)
	// Output: {"Count":7,"Pages":0} <nil>
}
